"""The etcd3 package, made to work with the protobuf that is installed.

etcd3 0.12.0 carries generated code that protobuf 4 and newer refuse to load. :func:`etcd3` imports it over distop's own
messages. These have a descriptor pool of their own, so they cannot conflict with the caller's imports.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError

if TYPE_CHECKING:
    from collections.abc import Iterable

_lock = threading.Lock()


def etcd3() -> ModuleType:
    """The etcd3 that the caller has imported already; else etcd3 imported over our messages.

    A later ``import etcd3`` gives the same module. Raises DistopError when the package is not installed.
    """
    with _lock:
        loaded = sys.modules.get("etcd3")
        if loaded is not None:
            return loaded
        modules = _messages()
        replaced = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        try:
            package = importlib.import_module("etcd3")
        except BaseException as error:
            for name, module in replaced.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
            if isinstance(error, ImportError):
                raise DistopError(
                    f"the package etcd3 cannot be imported ({error}): install it with pip install 'distop[etcd3]'"
                ) from error
            raise
        package.etcdrpc = modules["etcd3.etcdrpc"]  # type: ignore[attr-defined]
        return package


def _messages() -> dict[str, ModuleType]:
    """The modules that replace ``etcd3.etcdrpc`` and its parts: messages, enums and stubs."""
    from distop.store._proto import auth_pb2, kv_pb2, rpc_pb2

    package = ModuleType("etcd3.etcdrpc", "etcd's messages and stubs, provided by distop.compat.")
    package.__path__ = []
    stubs = ModuleType("etcd3.etcdrpc.rpc_pb2_grpc", "etcd's stubs, provided by distop.compat.")
    for service in rpc_pb2.DESCRIPTOR.services_by_name.values():
        setattr(stubs, f"{service.name}Stub", _stub(service, rpc_pb2))
    for source in (rpc_pb2, stubs):
        for name, value in vars(source).items():
            if not name.startswith("_"):
                setattr(package, name, value)
    modules: dict[str, ModuleType] = {"etcd3.etcdrpc": package}
    parts: Iterable[tuple[str, ModuleType]] = (
        ("rpc_pb2", rpc_pb2),
        ("kv_pb2", kv_pb2),
        ("auth_pb2", auth_pb2),
        ("rpc_pb2_grpc", stubs),
    )
    for name, module in parts:
        setattr(package, name, module)
        modules[f"etcd3.etcdrpc.{name}"] = module
    return modules


def _stub(service: Any, messages: ModuleType) -> type:
    """A stub class as grpcio-tools would generate it: one callable per method of the service, at etcd's own path."""
    path = service.full_name.removeprefix("distop.etcd.v3.")

    def __init__(self: Any, channel: Any) -> None:
        for method in service.methods:
            kinds = ("unary", "stream")
            kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
            call = getattr(channel, kind)(
                f"/{path}/{method.name}",
                request_serializer=getattr(messages, method.input_type.name).SerializeToString,
                response_deserializer=getattr(messages, method.output_type.name).FromString,
            )
            setattr(self, method.name, call)

    return type(f"{service.name}Stub", (), {"__init__": __init__, "__doc__": f"Client of {path}."})
