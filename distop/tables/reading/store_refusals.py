"""Finds the cause for which a store refuses all files of a table: access, bucket, network.

It is found by exception class, error number or error code, and by the error's text for libraries that have none of
these.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Any

from distop.errors import TableBusy, TableRefused, TableUnavailable
from distop.runtime.java import java_exceptions
from distop.storage.store_errors import (
    CHECK_ACCESS,
    UNKNOWN_USER,
    BucketMissing,
    Denied,
    ObjectChanged,
    ObjectMissing,
    StoreError,
    Throttled,
    TimedOut,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DENIED = "access is denied"
CREDENTIALS = "the credentials are not accepted, or there are none"
NO_BUCKET = "there is no such bucket"
NOT_CONNECTED = "the connection fails"
UNKNOWN_HOST = "the name of the host cannot be resolved"
NO_ANSWER = "there is no answer"
INTERNAL_ERROR = "the service reports an internal error"
REDIRECTED = "the service redirects all requests: the bucket may be in another region"
NOT_ACCEPTED = "the service does not accept the requests: a token may have expired, or the region may be wrong"
PROXY = "a proxy asks for credentials"
THROTTLED = "there are too many requests for the service"
OTHER_STATUS = "the service answers with HTTP status"
NO_FILE_SYSTEM = "no file system for this kind of location is installed"

TRANSIENT = frozenset({THROTTLED, NO_ANSWER})
"""Causes that need no action: a retry succeeds later."""
TRANSIENT_FOR_SOME = frozenset({NOT_CONNECTED, UNKNOWN_HOST, INTERNAL_ERROR})
"""Causes for which a retry succeeds later, if other requests succeed. Otherwise another executor may have access."""
_PERMANENT = frozenset({DENIED, CREDENTIALS, NO_BUCKET, REDIRECTED, NOT_ACCEPTED, PROXY, NO_FILE_SYSTEM})
PROBED = 3
"""Number of files that are read one by one, to find out whether the store refuses all files or a single one."""

_SDK = "software.amazon.awssdk.core.exception"
_CAUSE_BY_CLASS = {
    **dict.fromkeys(
        (
            *("java.nio.file.AccessDeniedException", "org.apache.hadoop.security.AccessControlException"),
            *("org.apache.iceberg.exceptions.ForbiddenException", "java.security.AccessControlException"),
        ),
        DENIED,
    ),
    **dict.fromkeys(
        (
            *("org.apache.hadoop.fs.s3a.auth.NoAuthWithAWSException", "javax.security.sasl.SaslException"),
            *("org.apache.hadoop.fs.s3a.CredentialInitializationException", "org.ietf.jgss.GSSException"),
            *("org.apache.hadoop.fs.s3a.auth.NoAwsCredentialsException", "javax.security.auth.login.LoginException"),
            "org.apache.hadoop.security.authentication.client.AuthenticationException",
            "org.apache.hadoop.security.token.SecretManager$InvalidToken",
            *("org.apache.iceberg.exceptions.NotAuthorizedException", "javax.net.ssl.SSLHandshakeException"),
            "org.apache.hadoop.fs.azurebfs.contracts.exceptions.KeyProviderException",
        ),
        CREDENTIALS,
    ),
    **dict.fromkeys(
        (
            "org.apache.hadoop.fs.s3a.UnknownStoreException",
            "software.amazon.awssdk.services.s3.model.NoSuchBucketException",
        ),
        NO_BUCKET,
    ),
    "java.net.SocketException": NOT_CONNECTED,  # refused, without a route, or reset
    **dict.fromkeys(("java.net.UnknownHostException", "java.nio.channels.UnresolvedAddressException"), UNKNOWN_HOST),
    **dict.fromkeys(
        (
            *("java.net.SocketTimeoutException", f"{_SDK}.ApiCallTimeoutException"),
            f"{_SDK}.ApiCallAttemptTimeoutException",
        ),
        NO_ANSWER,
    ),
    "org.apache.hadoop.fs.s3a.AWSServiceThrottledException": THROTTLED,
    "org.apache.hadoop.fs.UnsupportedFileSystemException": NO_FILE_SYSTEM,
}
"""Names of Java exception classes; subclasses count as well."""
_HTTP_CLIENT = re.compile(r"\bapache\.(?:http|hc)\.(?:\w+\.)*(\w+)$")
"""Apache's HTTP client, which Amazon's client has below a package of its own."""
_CAUSE_BY_HTTP_CLASS = {
    **dict.fromkeys(("NoHttpResponseException", "ConnectionClosedException"), NOT_CONNECTED),
    "ConnectTimeoutException": NO_ANSWER,
}
_SUPERCLASSES = 10
_STATUS = re.compile(r"(?:\bstatus code:? |^|\", )([345][0-9]{2})\b", re.IGNORECASE)
"""The status of an answer in messages of Amazon's, Google's and Microsoft's clients."""
_PYARROW_STATUS = re.compile(r"AWS Error \w+ \(HTTP status ([345][0-9]{2})\)")
"""The status of an answer without a known code in messages of pyarrow. Answers to HEAD never have a code."""
_CAUSE_BY_STATUS = {400: NOT_ACCEPTED, 401: CREDENTIALS, 403: DENIED, 407: PROXY, 429: THROTTLED}
_SINGLE_FILE_STATUSES = frozenset({404, 410, 416})
"""Statuses that concern a single file: not found, gone, too short for the range."""
_SERVICE = re.compile(r"(?:software\.amazon|com\.amazonaws|com\.google\.cloud|org\.apache\.hadoop\.fs\.azurebfs)\.")
_UNKNOWN_USER = "No user exists with the provided access key ID"
"""versitygw's message for the code ``UNKNOWN_USER``. Amazon's client for Java quotes no code."""
_MISSING_CLASS = re.compile(r"(?:java\.lang\.ClassNotFoundException: )?Class \S+ not found")
_TASK_FAILURE = re.compile(
    r"Job aborted due to stage failure: Task \S+ in stage \S+ failed \d+ times, most recent failure: "
    r"Lost task \S+ in stage \S+ \(TID \d+\)(?: \(\S+ executor \S+\))?: ([\w.$]+)"
)
"""Spark's message about a failed task, with the exception's class; the text after it may be data."""

_CAUSE_BY_ERRNO = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), DENIED),
    **dict.fromkeys((errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN), NOT_CONNECTED),
    errno.ETIMEDOUT: NO_ANSWER,
}
_CAUSE_BY_TEXT: Sequence[tuple[re.Pattern[str], str]] = (
    # The codes of Amazon's, Google's and Microsoft's services and of curl, as pyarrow passes them on.
    (re.compile(r"AWS Error (?:INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID)"), CREDENTIALS),
    (re.compile(r"AWS Error (?:EXPIRED_TOKEN|MISSING_AUTHENTICATION_TOKEN|INVALID_SIGNATURE)"), CREDENTIALS),
    (re.compile(rf"ExceptionName: {UNKNOWN_USER}\b"), CREDENTIALS),
    (re.compile(r"AWS Error ACCESS_DENIED|Status\(PERMISSION_DENIED|AuthorizationFailure"), DENIED),
    (re.compile(r"Status\(UNAUTHENTICATED|AuthenticationFailed|InvalidAuthenticationInfo"), CREDENTIALS),
    (re.compile(r"AWS Error NO_SUCH_BUCKET|ContainerNotFound"), NO_BUCKET),
    (re.compile(r"curlCode: 6\b|CURL error \[6\]|UnknownHostException"), UNKNOWN_HOST),
    (re.compile(r"curlCode: 28\b|CURL error \[28\]|SocketTimeoutException"), NO_ANSWER),
    (re.compile(r"AWS Error NETWORK_CONNECTION|CURL error \[(?:7|35|56)\]|ConnectException"), NOT_CONNECTED),
)


_BAD_CREDENTIALS = frozenset(
    {
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
        *("AuthenticationFailed", "InvalidAuthenticationInfo", UNKNOWN_USER),
    }
)
"""Codes of S3, versitygw and Azure."""
_CAUSE_BY_ERROR = ((Unreachable, NOT_CONNECTED), (TimedOut, NO_ANSWER))


def cause_of_spark_error(error: Exception) -> str | None:
    """The store's cause of a Spark error; None if the store did not cause it.

    Raises the errors of the connection to the JVM.
    """
    for one in java_exceptions(error):
        text = str(one.getMessage() or "")
        for name in _classes(one):
            if name in _CAUSE_BY_CLASS:
                return _CAUSE_BY_CLASS[name]
            client = _HTTP_CLIENT.search(name)
            if client is not None and client[1] in _CAUSE_BY_HTTP_CLASS:
                return _CAUSE_BY_HTTP_CLASS[client[1]]
            if not _SERVICE.match(name):
                continue
            if _UNKNOWN_USER in text:
                return CREDENTIALS
            status = _STATUS.search(text)
            if status is not None and (cause := _cause_of_status(int(status[1]))) is not None:
                return cause
        if _MISSING_CLASS.match(text) and "FileSystem" in text:
            return NO_FILE_SYSTEM
        quoted = _TASK_FAILURE.match(text)
        if quoted is not None and quoted[1] in _CAUSE_BY_CLASS:
            return _CAUSE_BY_CLASS[quoted[1]]
    return None


def _classes(one: Any) -> Iterator[str]:
    found = one.getClass()
    for _ in range(_SUPERCLASSES):
        if found is None:
            return
        yield str(found.getName())
        found = found.getSuperclass()


def cause_of_python_error(error: BaseException | None) -> str | None:
    """The store's cause of an error of Python, pyarrow or our own storage layer, or None."""
    if isinstance(error, StoreError):
        return _cause_of_store_error(error)
    if not isinstance(error, OSError):
        return None
    if error.errno in _CAUSE_BY_ERRNO:
        return _CAUSE_BY_ERRNO[error.errno]
    text = str(error)
    found = next((cause for code, cause in _CAUSE_BY_TEXT if code.search(text)), None)
    if found is None and (status := _PYARROW_STATUS.search(text)) is not None:
        return _cause_of_status(int(status[1]))
    return found


def error_of_cause(cause: str, text: str) -> TableUnavailable:
    """The error for a table whose files the object store refuses, all for this cause."""
    if cause in TRANSIENT:
        return TableBusy(text)
    if cause in _PERMANENT or cause.startswith(OTHER_STATUS):
        return TableRefused(text + CHECK_ACCESS)
    return TableUnavailable(text)


def _cause_of_store_error(error: StoreError) -> str | None:
    if isinstance(error, BucketMissing):
        return NO_BUCKET
    if isinstance(error, ObjectMissing | ObjectChanged):
        return None
    if isinstance(error, Throttled):
        return THROTTLED
    if error.code in _BAD_CREDENTIALS:
        return CREDENTIALS
    if error.status:
        return _cause_of_status(error.status)
    found = next((cause for kind, cause in _CAUSE_BY_ERROR if isinstance(error, kind)), None)
    return CREDENTIALS if found is None and isinstance(error, Denied) else found


def _cause_of_status(status: int) -> str | None:
    """The store's cause of an HTTP status; None if the status concerns a single file."""
    if status in _SINGLE_FILE_STATUSES:
        return None
    if status < 400:
        return REDIRECTED
    return INTERNAL_ERROR if status >= 500 else _CAUSE_BY_STATUS.get(status, f"{OTHER_STATUS} {status}")


def evenly_spaced(files: Sequence[Any], count: int = PROBED) -> list[Any]:
    """``count`` of these files, evenly spaced from the first to the last."""
    if len(files) <= count:
        return list(files)
    return [files[n * (len(files) - 1) // (count - 1)] for n in range(count)]
