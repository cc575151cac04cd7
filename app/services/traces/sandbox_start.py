"""Early start of the sandbox, which takes ten seconds, where keys exist whose code would wait for it.

The lifecycle calls this each time that an engine becomes ready, since the sandbox ends with its engine.
"""

from __future__ import annotations

import logging

from api_schemas.errors import ApiError
from app.auth.code_policy import takes_code
from app.auth.keys import Keys
from app.engine.client import EngineClient
from app.settings import Settings

logger = logging.getLogger(__name__)


async def start_sandbox(settings: Settings, engine: EngineClient, keys: Keys) -> None:
    """Start the sandbox if some key's code needs one; errors are logged, and the first request gets them."""
    if settings.sandbox != "process" or not takes_code(settings):
        return
    try:
        if await keys.need_sandbox():
            await engine.prepare_sandbox()
    except ApiError as error:
        logger.warning("the sandbox could not be started ahead: %s", error.message)
    except Exception:
        logger.exception("the sandbox could not be started ahead")


__all__ = ["start_sandbox"]
