"""Errors of object stores, one class for each reaction of the caller.

Each is an OSError as well, of the kind that files have for the same case (FileExistsError and so on), so that code of
files and of objects treats both alike.
"""

from __future__ import annotations

import html
import os
import re
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from distop.errors import DistopError, TableBusy, TableRefused, TableUnavailable, message_of
from distop.protocol.texts import one_line
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>|\(code: (\d{3})\)")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_SLOW = frozenset({"SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests"})
"""Error codes that ask for fewer requests. ServerBusy (Azure) and others come with status 503 or 429."""
_NO_PLACE = frozenset({"NoSuchBucket", "ContainerNotFound"})
UNKNOWN_USER = "XAdminUserNotFound"
"""The code of versitygw, with the status 404, for an access key that it does not know."""
_SLOW_REQUESTS = frozenset({"RequestTimeout", "RequestTimeoutException"})
"""Codes of S3, with the status 400, for requests that it has not read in time."""
_BAD_KEY = "Encountered object with invalid path: "
"""obstore's text for a listed key with an empty name, ``.`` or ``..``."""
_UNKNOWN_COMPLETION = "Got invalid multipart response"
"""obstore's text for an error in an answer of S3 with the status 200, which had begun before the work was done."""
_REDIRECTED = "Received redirect without LOCATION"
"""obstore's text for an answer 301 or 307 of S3, which is in another region."""
_WHOLE = "Received non-partial response when range requested"
_BAD_RANGE = "Failed to parse value for CONTENT_RANGE header"
_CONNECT = "kind: Connect"
_TIMEOUT = "kind: Timeout"
_DEBUG = "Debug source:"
_REQUEST = re.compile(r"Generic (\w+) error: Error performing ([A-Z]+) (\S+) in \d")
"""The start of obstore's text for a failed request: the store, the method and the URL, which has no blanks."""
_TOKEN_REQUEST = re.compile(
    r"Generic (?:GCS|MicrosoftAzure) error: Error performing token request"
    r"|Generic S3 error: (?:Invalid AssumeRoleWithWebIdentity response: |Failed to read token file )"
)
"""The start of obstore's texts for requests for credentials that name no URL."""
_HIDDEN_URL = "REDACTED"
"""In place of the URL of S3's token service, which has the token; obstore shows all other URLs of S3."""
_CREDENTIAL_HOSTS = frozenset({"169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"})
"""The addresses at which AWS gives credentials to instances and containers."""
_INSTANCE_PATHS = ("/latest/api/token", "/latest/meta-data/iam/security-credentials")
_TRANSPORT = re.compile(r"kind: (?:Connect|Request|Timeout|Interrupted)\b")
_HTTP_KIND = re.compile(r"kind: \w+")
_LONGEST_CAUSE = 300
CHECK_ACCESS = "; check this machine's access with `distop doctor --storage URL`"
"""The end of an error about a store that refuses a table: what to do next."""
_REFUSALS = range(300, 500)
"""Statuses of answers that a retry does not change."""


class StoreError(DistopError, OSError):
    """A request to an object store failed, and a retry would fail as well.

    ``status`` and ``code``: of the store's answer (0 and "": there was none, or it had none).
    """

    status = 0
    code = ""


class ObjectExists(StoreError, FileExistsError):
    """The object exists already, and another writer has created it. Nothing was written."""


class ObjectChanged(StoreError):
    """The object has another version than the expected one, or is gone. Nothing was read or written."""


class ObjectMissing(StoreError, FileNotFoundError):
    """There is no such object, or no such bucket or container."""


class BucketMissing(ObjectMissing):
    """There is no such bucket or container."""


class Denied(StoreError, PermissionError):
    """The store refuses these credentials, or there are none."""


class Unsupported(StoreError):
    """The store does not support this kind of request."""


class StoreUnavailable(StoreError):
    """The store did not serve the request, and may serve it later. The state of the object is unknown: retry later."""


class Throttled(StoreUnavailable):
    """The store asks for fewer requests (503 SlowDown, 429), and refused every retry within the time limit."""


class TimedOut(StoreUnavailable, TimeoutError):
    """No answer came within the time limit, and the request has changed nothing."""


class Unreachable(TimedOut):
    """No connection could be made within the time limit."""


class UnknownWrite(StoreError):
    """A write may or may not have been applied, and reading the object back did not decide it.

    Only the caller can decide: read the object, and judge by its content.
    """


class AnswerLost(StoreUnavailable):
    """The answer to one request was lost, or was a server's error. A write may have been applied.

    :mod:`distop.storage.conditional_writes` settles it; callers of a store see one of the other errors.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class NotConnected(StoreUnavailable):
    """No connection could be made, or no credentials were given in time: the request was certainly not applied."""


class InvalidRange(StoreError):
    """The requested range starts behind the end of the object."""


class RangeIgnored(StoreError):
    """The store sends a whole object instead of the requested range, or gives no valid range for an empty one."""


def asked(call: Callable[[], T], what: str) -> T:
    """The answer to one request of obstore. Raises our errors for obstore's. ``what``: for their texts."""
    from obstore.exceptions import BaseError

    try:
        return call()
    except (BaseError, FileNotFoundError) as error:
        raise translated(error, what) from None


def translated(error: BaseException, what: str) -> StoreError:
    """The StoreError for an error of obstore. ``what``: the request, such as ``create s3://lake/a``."""
    if isinstance(error, StoreError):
        return error
    text = message_of(error)
    status, code = _status_of(text), _code_of(text)
    found = _translated(error, what, text, status, code)
    found.status, found.code = status, code
    return found


def _translated(error: BaseException, what: str, text: str, status: int, code: str) -> StoreError:
    from obstore import exceptions as e

    message = f"cannot {what}: {_cause(text, status, code)}"
    if _is_for_credentials(text):
        return NotConnected(message) if _may_be_given_later(text, status, code) else Denied(message)
    if code in _NO_PLACE:
        return BucketMissing(f"cannot {what}: there is no such bucket or container")
    denied = status in (401, 403) or code == UNKNOWN_USER
    if isinstance(error, e.PermissionDeniedError | e.UnauthenticatedError) or denied:
        return Denied(message)
    if isinstance(error, e.AlreadyExistsError):
        return ObjectExists(f"cannot {what}: it exists already")
    if isinstance(error, e.PreconditionError) or status in (409, 412):
        return ObjectChanged(f"cannot {what}: the object has changed, or is gone")
    if isinstance(error, FileNotFoundError) or status == 404:
        return ObjectMissing(f"cannot {what}: there is no such object")
    if _WHOLE in text or _BAD_RANGE in text:
        return RangeIgnored(message)
    if _BAD_KEY in text:
        found = text.partition(_BAD_KEY)[2].partition(_DEBUG)[0].strip()
        return Unsupported(f"cannot {what}: it has an object whose key distop does not support: {one_line(found)}")
    if status == 416 or "Invalid range: " in text:
        return InvalidRange(message)
    if isinstance(error, e.NotSupportedError) or status == 501:
        return Unsupported(message)
    return _transport_error(text, status, code, message)


def _is_for_credentials(text: str) -> bool:
    """Whether the failed request was one for credentials: then none was sent to the store.

    Judges the start of the text only, because keys of objects and answers of stores follow.
    """
    if _TOKEN_REQUEST.match(text):
        return True
    found = _REQUEST.match(text)
    if found is None or found[1] != "S3":
        return False
    url = found[3].partition("?")[0].rstrip("/")
    if url == _HIDDEN_URL or url == os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "").rstrip("/"):
        return True
    own = os.environ.get("AWS_METADATA_ENDPOINT", "").rstrip("/")
    if own and url.startswith(tuple(f"{own}{path}" for path in _INSTANCE_PATHS)):
        return True
    return urlsplit(url).hostname in _CREDENTIAL_HOSTS


def _may_be_given_later(text: str, status: int, code: str) -> bool:
    """Whether another request for credentials may succeed."""
    if status:
        return status in (408, 429) or status >= 500 or code in _SLOW
    kind = _HTTP_KIND.search(text.partition(_DEBUG)[2])
    return kind is not None and _TRANSPORT.match(kind[0]) is not None


def _transport_error(text: str, status: int, code: str, message: str) -> StoreError:
    if status in (429, 503) or code in _SLOW:
        return Throttled(message)
    if status >= 500 or status == 408 or code in _SLOW_REQUESTS or _UNKNOWN_COMPLETION in text:
        return AnswerLost(message)
    if status:
        return StoreError(message)
    if _CONNECT in text:
        return NotConnected(message)
    if "HttpError" in text:
        return AnswerLost(message, timed_out=_TIMEOUT in text)
    return StoreError(message)


def _status_of(text: str) -> int:
    found = _STATUS.search(text)
    if found:
        return int(found[1])
    return 301 if _REDIRECTED in text else 0


def _code_of(text: str) -> str:
    found = _CODE.search(text)
    return (found[1] or found[2]) if found else ""


def _cause(text: str, status: int, code: str) -> str:
    """The cause in one line: the store's own code and message, without the ids and signatures of its answer."""
    cause = ""
    if status:
        message = _MESSAGE.search(text)
        parts = (f"status {status}", code, html.unescape(message[1]).strip() if message else "")
        cause = one_line(" ".join(filter(None, parts)))
    elif _CONNECT in text:
        cause = "no connection"
    elif _TIMEOUT in text:
        cause = "no answer in time"
    plain = text.partition(_DEBUG)[0].strip().splitlines()
    if _is_for_credentials(text):
        if not cause:
            cause = one_line(plain[0].partition(" error: ")[2])
            cause = secret_settings.shortened(cause, _LONGEST_CAUSE)
        request = _REQUEST.match(text)
        if text.startswith("Generic S3 error: ") and (request is None or request[3] == _HIDDEN_URL):
            return f"no credentials: the token service gave none for the web identity ({cause})"
        return (
            "no credentials in the environment or a profile, and this machine's service for credentials gave none "
            f"({cause})"
        )
    if cause:
        return cause
    return secret_settings.shortened(one_line(plain[0] if plain else "no cause given"), _LONGEST_CAUSE)


def unavailable(text: str, error: BaseException) -> TableUnavailable:
    """The error of a table whose file or folder could not be read. A store's refusal is final.

    A missing object is not a refusal: a writer may have removed it since it was named.
    """
    if isinstance(error, Throttled | TimedOut):
        return TableBusy(text)
    refused = isinstance(error, StoreError) and not isinstance(error, ObjectMissing) and error.status in _REFUSALS
    if refused or isinstance(error, Denied | BucketMissing):
        return TableRefused(text + CHECK_ACCESS)
    if isinstance(error, Unsupported):
        return TableRefused(text)
    return TableUnavailable(text)
