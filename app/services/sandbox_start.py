"""Starting the sandbox before its first code comes, where keys exist whose code would wait for it.

It takes ten seconds and some memory, so whoever has no such keys is spared both. The lifecycle runs this each
time that an engine serves anew, since the sandbox goes with its engine; nothing waits for it, and what goes
wrong is said again to whoever needs a sandbox.
"""

from __future__ import annotations

import logging

from api_schemas.errors import ApiError
from app.auth.keys import Keys
from app.engine.client import EngineClient
from app.services.code_policy import takes_code
from app.settings import Settings

logger = logging.getLogger(__name__)


async def start_sandbox(settings: Settings, engine: EngineClient, keys: Keys) -> None:
    """Have sandboxes started, if some key's code is to run in one."""
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
