"""``tailrace token``: create, inspect and revoke access tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import REFUSED, UsageError
from tailrace.cli.key import InFile, is_key, open_existing_key_file
from tailrace.cli.key import revoke as revoke_key
from tailrace.cli.options import ActorId, Databases, Prefixes, Scopes, parse_lifetime_s
from tailrace.cli.session import DEFAULT_SESSION, Session, print_json

_HELP: Final = """Create, inspect and revoke access tokens (JWT).

For example:

    export TAILRACE_AUTH_JWT_SECRET=$(openssl rand -hex 32)

    tailrace token create --sub ci --scope write --streams builds/ --expires 8h

    tailrace token inspect "$TAILRACE_TOKEN"

    tailrace token revoke --sub ci
"""

AsJson = Annotated[bool, Parameter(negative="", help="Print JSON.")]

command = App(name="token", help=_HELP, help_format="markdown")


@command.command
def create(
    *,
    sub: Annotated[str, Parameter(help="The subject of the token.")],
    scope: Scopes,
    streams: Prefixes = None,
    db: Databases = None,
    actor_id: ActorId = None,
    expires: Annotated[str, Parameter(help="Lifetime, such as 30m, 8h or 90d, or never.")] = "1h",
    secret: Annotated[
        str | None, Parameter(env_var="TAILRACE_AUTH_JWT_SECRET", help="The server's secret.")
    ] = None,
    issuer: Annotated[str, Parameter(env_var="TAILRACE_AUTH_ISSUER", help="The iss claim.")] = "",
    audience: Annotated[str, Parameter(env_var="TAILRACE_AUTH_AUDIENCE", help="The aud claim.")] = "",
    config: Annotated[
        str, Parameter(help="The server's settings file, for absent flags: secret, issuer, audience.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Create a token signed with the server's secret (HS256) and print it."""
    from tailrace.auth import create_token

    if config:
        from tailrace.common.settings_loading import load_settings

        settings = load_settings({"config": config})
        secret = secret or settings.auth_jwt_secret
        issuer, audience = issuer or settings.auth_issuer, audience or settings.auth_audience
    if not secret:
        raise UsageError("the secret is missing: set TAILRACE_AUTH_JWT_SECRET to that of the server")
    token = create_token(
        secret,
        sub=sub,
        scopes=scope,
        streams=streams,
        dbs=db,
        actor_id=actor_id,
        lifetime_s=parse_lifetime_s(expires),
        issuer=issuer,
        audience=audience,
    )
    if json:
        print_json({"token": token})
    else:
        print(token)


@command.command
def inspect(
    token: Annotated[str, Parameter(help="The token, with or without Bearer.")],
    /,
    *,
    json: AsJson = False,
) -> int:
    """Print a token and whether its times and claims are valid. The signature is not checked."""
    import msgspec

    from tailrace.auth import inspect_token

    report = inspect_token(token)
    if json:
        print_json(msgspec.structs.asdict(report))
    else:
        expiry = "never" if report.expires_in_s is None else f"in {report.expires_in_s:,.0f} s"
        print(f"algorithm  {report.header.get('alg')}")
        print(f"subject    {report.claims.get('sub')}")
        print(f"id         {report.claims.get('jti', 'none')}")
        print(f"scopes     {' '.join(report.scopes) or 'none'}")
        print(f"streams    {'all' if report.streams is None else ', '.join(report.streams)}")
        print(f"expires    {expiry}")
        for problem in report.problems:
            print(f"problem    {problem}")
    return REFUSED if report.problems else 0


@command.command
def revoke(
    token: Annotated[str | None, Parameter(help="The token, or its id (the claim jti).")] = None,
    /,
    *,
    sub: Annotated[str | None, Parameter(help="Instead: all tokens issued to this subject so far.")] = None,
    file: InFile = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Revoke a token, or all tokens of a subject. Connections opened with them are closed.

    An API key is revoked as by `tailrace key revoke`.
    """
    if (token is None) == (sub is None):
        raise UsageError("give a token or its id, or a subject with --sub")
    if token is not None and is_key(token):
        revoke_key(token, file=file, session=session)
        return
    asked: dict[str, Any] = {"sub": sub} if token is None else _named(token)
    if file is not None:
        book = open_existing_key_file(file)
        if token is None:
            book.revoke_subject(str(sub))
        else:
            book.revoke_token(asked["jti"], asked.get("exp"))
    else:
        from tailrace.cli.session import post_json

        post_json(session, "/v1/server/_revocations", asked)
    if session.json:
        print_json({"revoked": asked})
    else:
        print(f"revoked {asked.get('jti') or sub}")


def _named(token: str) -> dict[str, Any]:
    """The id of a token, and its expiry if it is known."""
    from tailrace.auth import inspect_token

    if token.startswith("trg_"):
        raise UsageError(
            "this is an internal token of the server, which expires by itself and cannot be revoked"
        )
    if token.count(".") != 2:
        return {"jti": token}
    claims = inspect_token(token).claims
    if not isinstance(claims.get("jti"), str):
        raise UsageError("the token has no id (jti): revoke its subject with --sub")
    expires = {"exp": int(claims["exp"])} if isinstance(claims.get("exp"), int | float) else {}
    return {"jti": claims["jti"], **expires}
