"""``nnsight-engine keys``, on the server's database, whether or not the server runs.

Only a new key is written to standard output, so that a script can capture it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Column, Table

from api_schemas.administration import CreatedKey, Key, Limits, NewKey, Rotation, Scope, Tenant, Tier
from api_schemas.errors import ApiError
from app.audit import command_record
from app.auth.keys import Keys, parse_key
from app.command_error import CommandError, read_settings
from app.settings import Settings
from app.storage.audit import AuditStore
from app.storage.database import Database, DatabaseError
from app.storage.keys import KeyStore, KeyTakenError

T = TypeVar("T")
Changed = TypeVar("Changed", bound=Key | Tenant)

_LIMITS_HELP: Final = "Like `requests_per_minute=60,concurrency=4`."
_COMMANDS: Final = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Manage the keys of this server: who may use it, and for what purpose.",
)

Work = Callable[[Keys], Awaitable[T]]


def run(arguments: Sequence[str]) -> None:
    """Run one command; raises CommandError, or typer.TyperException for wrong arguments."""
    settings = read_settings()
    try:
        _COMMANDS(list(arguments), prog_name="nnsight-engine keys", standalone_mode=False, obj=settings)
    except (ApiError, DatabaseError) as error:
        raise CommandError(str(error)) from error
    except ValidationError as error:
        raise CommandError(_first_problem(error)) from error


async def has_keys(settings: Settings) -> bool:
    """Return whether a key was ever created for this server; raises DatabaseError."""
    return await _on_keys(settings, Keys.are_required)


async def _on_keys(settings: Settings, work: Work[T]) -> T:
    async with _opened_database(settings) as database:
        return await work(Keys(KeyStore(database)))


@contextlib.asynccontextmanager
async def _opened_database(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings.data_dir, settings.database_url)
    await database.start()
    try:
        yield database
    finally:
        await database.close()


def _change_recorded(settings: Settings, command: str, subject: str, work: Work[Changed]) -> Changed:
    """Change a key or a tenant in the database, and write the change to the audit log if that is on."""

    async def changing() -> Changed:
        async with _opened_database(settings) as database:
            changed = await work(Keys(KeyStore(database)))
            if settings.audit_days:
                await AuditStore(database).write([command_record(command, subject, changed).row()])
            return changed

    return asyncio.run(changing())


@_COMMANDS.command()
def create(  # noqa: PLR0913, PLR0917 - options of a command
    context: typer.Context,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="The owner: a team or a customer.")],
    scopes: Annotated[
        str, typer.Option(metavar="SCOPES", help="Its permissions, separated by commas.")
    ] = "completions",
    name: Annotated[str, typer.Option(metavar="TEXT", help="A description.")] = "",
    tier: Annotated[Tier, typer.Option(help="How its code runs.")] = Tier.SANDBOXED,
    limits: Annotated[str, typer.Option(metavar="LIMITS", help=_LIMITS_HELP)] = "",
    trusted_codecs: Annotated[  # noqa: FBT002 - a flag
        bool,
        typer.Option("--trusted-codecs", help="Also accept its blocks as pickles, which can run any code."),
    ] = False,
    expires: Annotated[float | None, typer.Option(metavar="DAYS", help="Days until it ends.")] = None,
    presets: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="The only presets by which it may intervene, like `calm,brief@2`; those with code need a "
            "version; any if omitted.",
        ),
    ] = "",
) -> None:
    """Create a key and print it; it is not shown again."""
    new = NewKey(
        tenant=tenant,
        scopes=_scopes(scopes),
        name=name,
        tier=tier,
        limits=_limits(limits),
        trusted_codecs=trusted_codecs,
        expires_in_s=None if expires is None else expires * 86400,
        presets=tuple(preset.strip() for preset in presets.split(",")) if presets else None,
    )
    _show(_change_recorded(context.obj, "keys create", "", lambda keys: keys.create(new)))


@_COMMANDS.command()
def adopt(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A file that contains only the key, `nns_…`.")],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="The owner: a team or a customer.")],
    scopes: Annotated[
        str, typer.Option(metavar="SCOPES", help="Its permissions, separated by commas.")
    ] = "completions",
    name: Annotated[str, typer.Option(metavar="TEXT", help="A description.")] = "",
) -> None:
    """Register the key that a file contains, such as an orchestrator's secret, unless it is registered."""
    new = NewKey(tenant=tenant, scopes=_scopes(scopes), name=name)
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from error
    secret = parse_key(text)
    if secret is None:
        raise typer.BadParameter(
            f"{file} must contain a key: nns_, 16 characters of 0-9a-f, _, 43 characters of 0-9A-Za-z-_"
        )

    def recognized() -> Key | None:
        return asyncio.run(_on_keys(context.obj, lambda keys: keys.recognized(secret)))

    key = recognized()
    if key is None:
        try:
            key = _change_recorded(context.obj, "keys adopt", "", lambda keys: keys.adopt(secret, new))
        except KeyTakenError:  # several processes start at once, and another one was first
            key = recognized()
            if key is None:
                raise
    typer.echo(f"The key {key.id} of {key.tenant} is registered.", err=True)


@_COMMANDS.command("list")
def list_keys(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only keys of this tenant.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """List keys, newest first, including those that have ended."""
    keys = asyncio.run(_on_keys(context.obj, lambda keys: keys.page(tenant)))
    if as_json:
        typer.echo(json.dumps([key.model_dump(mode="json") for key in keys], indent=2))
        return
    if not keys:
        of_tenant = "" if tenant is None else f" of {tenant}"
        typer.echo(f"There are no keys{of_tenant}; nnsight-engine keys create makes one.", err=True)
        return
    table = Table(
        Column("id", no_wrap=True), "tenant", "name", "scopes", "tier", "limits", "presets", "created",
        "used", "ends",
    )  # fmt: skip
    for key in keys:
        table.add_row(
            key.id, key.tenant, key.name, ", ".join(key.scopes), key.tier, _described_limits(key.limits),
            ", ".join(key.presets or ()), _day(key.created_at), _day(key.last_used_at), _end_text(key),
        )  # fmt: skip
    Console().print(table)


@_COMMANDS.command()
def limit(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    limits: Annotated[str, typer.Argument(help=_LIMITS_HELP)] = "",
) -> None:
    """Limit all keys of a tenant together; without LIMITS, remove the limits."""
    new_limits = _limits(limits)
    changed = _change_recorded(context.obj, "keys limit", tenant, lambda keys: keys.limit(tenant, new_limits))
    typer.echo(
        f"All keys of {changed.name} together: {_described_limits(changed.limits) or 'no limits'}.", err=True
    )


@_COMMANDS.command()
def rotate(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="The key's id.")],
    grace: Annotated[
        float, typer.Option(metavar="HOURS", help="Hours for which the old key remains valid.")
    ] = 0.0,
) -> None:
    """Replace a key by a new one with the same rights, and print it."""
    rotation = Rotation(grace_s=grace * 3600)
    _show(
        _change_recorded(
            context.obj, "keys rotate", key_id, lambda keys: keys.rotate(key_id, rotation.grace_s)
        )
    )


@_COMMANDS.command()
def revoke(context: typer.Context, key_id: Annotated[str, typer.Argument(help="The key's id.")]) -> None:
    """Revoke a key. A running server notices within seconds."""
    key = _change_recorded(context.obj, "keys revoke", key_id, lambda keys: keys.revoke(key_id))
    typer.echo(f"The key {key.id} of {key.tenant} is revoked.", err=True)


def _show(created: CreatedKey) -> None:
    typer.echo(
        f"A key of {created.tenant} for {', '.join(created.scopes)}, id {created.id}; not shown again:",
        err=True,
    )
    typer.echo(created.key)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"


def _scopes(text: str) -> tuple[Scope, ...]:
    try:
        return tuple(Scope(scope.strip()) for scope in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; scopes are {', '.join(Scope)}") from error


def _limits(text: str) -> Limits:
    """Parse limits such as ``requests_per_minute=60,concurrency=4``; raises ValidationError."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    return Limits.model_validate({name.strip(): _number(value.strip()) for name, _, value in pairs})


def _number(text: str) -> float | str:
    """Return a number; other text is returned as it is, for the validation to report."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _described_limits(limits: Limits) -> str:
    return ", ".join(f"{name}={value}" for name, value in limits.model_dump(exclude_none=True).items())


def _day(moment: float | None) -> str:
    if moment is None:
        return "–"
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def _end_text(key: Key) -> str:
    return f"revoked {_day(key.revoked_at)}" if key.revoked_at is not None else _day(key.expires_at)
