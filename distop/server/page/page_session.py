"""Who looks at the page: the token in a cookie, and the protection of forms.

The service keeps no state, so the cookie holds the caller's own token: any instance accepts it, and it ends when the
token is revoked. A form has a value that only a page of this service can know, derived from another cookie.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import TYPE_CHECKING

from distop.clock import uuid
from distop.errors import InvalidArgument, PermissionDenied
from distop.server.call_admission import CallerCredentials

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

TOKEN_COOKIE = "distop-token"
FORM_COOKIE = "distop-form"
FORM_FIELD = "form_key"
LONGEST_TOKEN = 2_800
"""Characters of a token that fits into a cookie, of about 4,000 bytes."""
_PURPOSE = b"distop: a form of the page"


def credentials_of_page(request: Request) -> CallerCredentials:
    """What identifies the browser: the token in its cookie."""
    peer = f"{request.client.host}:{request.client.port}" if request.client is not None else ""
    return CallerCredentials(_decoded(request.cookies.get(TOKEN_COOKIE, "")), (), peer)


def _decoded(cookie: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(cookie.encode()).decode() or None
    except ValueError:
        return None


def remember_token(response: Response, token: str, *, secure: bool) -> None:
    """Set the cookie with the token. Raises InvalidArgument if it is too long for a cookie."""
    if len(token.encode()) > LONGEST_TOKEN:
        raise InvalidArgument(f"the page takes tokens of at most {LONGEST_TOKEN} bytes: use REST with a longer one")
    value = base64.urlsafe_b64encode(token.encode()).decode()
    response.set_cookie(TOKEN_COOKIE, value, path="/", httponly=True, samesite="strict", secure=secure)


def forget_token(response: Response, *, secure: bool) -> None:
    """Remove the cookie with the token."""
    response.delete_cookie(TOKEN_COOKIE, path="/", httponly=True, samesite="strict", secure=secure)


def form_secret(request: Request) -> str:
    """The value of the cookie of forms; a new one if the browser has none."""
    return request.cookies.get(FORM_COOKIE) or uuid.uuid4().hex


def remember_form(response: Response, secret: str, *, secure: bool) -> None:
    """Set the cookie of forms."""
    response.set_cookie(FORM_COOKIE, secret, path="/", httponly=True, samesite="strict", secure=secure)


def form_key(secret: str) -> str:
    """The value of the hidden field of each form."""
    return hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).hexdigest()


def check_form(request: Request, given: str) -> None:
    """Raises PermissionDenied for a form that no page of this service has sent to this browser."""
    secret = request.cookies.get(FORM_COOKIE, "")
    if not secret or not hmac.compare_digest(form_key(secret).encode(), given.encode(errors="replace")):
        raise PermissionDenied("this form is not one of this page, or it is too old: load the page again")
