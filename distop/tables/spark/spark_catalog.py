"""Reads a table's description from Spark's catalog through the JVM, with few calls even for large tables."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.runtime import spark_rules
from distop.runtime.java import active, java_exceptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

IN_MEMORY = "give the executors --spark-conf spark.sql.catalogImplementation=hive, and the metastore that has it"
_PART = r"[^.`\s/\\:]+|`[^`/\\:\0]+`"
"""A part without characters of paths and URLs: catalogs read files by names such as parquet.`/path`."""
_TABLE = re.compile(rf"(?:(?P<catalog>[A-Za-z0-9_-]+|`[A-Za-z0-9_-]+`)\.)?(?P<database>{_PART})\.(?:{_PART})")
"""A catalog's name has no dot, because Spark reads its class from a setting of that name."""
_OF_SESSION = "spark_catalog"
"""The only catalog name that Spark compares case-insensitively."""
_BUILTIN = "builtin"
"""The value of Spark's setting for its own session catalog."""
_ICEBERG = ("org.apache.iceberg.spark.SparkCatalog", "org.apache.iceberg.spark.SparkSessionCatalog")
_WITHOUT_SERVER = ("hadoop", "hive")
"""Types of Iceberg's catalogs (default: ``hive``) that get no settings from their files or metastore."""
_DERBY = "Another instance of Derby"
"""Derby's error for a database that another JVM has open; its code (XSDB6) is not in the text."""
_OF_SERVERS = (
    *("java.net.", "java.sql.", "javax.net.", "org.apache.spark.", "org.apache.thrift.", "org.apache.hadoop.hive."),
    *("org.apache.hadoop.ipc.", "org.apache.hadoop.security.", "software.amazon.awssdk."),
)
"""Packages of exceptions that do not quote files."""
_MISSING = ("NoSuchTableException", "NoSuchNamespaceException", "NoSuchDatabaseException")


@frozen
class CatalogPartition:
    """A partition in the catalog: the value of each partition column as text, and its location."""

    values: Mapping[str, str | None]
    location: str


@frozen
class Described:
    """A table's description in Spark's catalog.

    ``provider``: ``parquet``, ``iceberg``, ``orc``, …, or ``view``. ``columns``: all columns, including partition
    columns, with their types as in ``StructType.json()``; ``partitions``: None if there are no partition columns.
    ``metadata``: the metadata file of an Iceberg table, "" for others.
    """

    provider: str
    location: str = ""
    columns: Sequence[Mapping[str, Any]] = ()
    partition_columns: tuple[str, ...] = ()
    partitions: Sequence[CatalogPartition] | None = None
    metadata: str = ""


def describe(session: Any, name: str, *, partitions: bool = True) -> Described:
    """Describe a table by its name: ``db.table``, or ``catalog.db.table``. ``partitions``: include them.

    Raises InvalidArgument if the catalog does not have it, for an invalid name, and for an untrusted catalog;
    TableUnavailable if the catalog cannot be read.
    """
    check_name(name)
    try:
        with active(session):
            return _describe(session, name, partitions=partitions)
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        thrown = list(java_exceptions(error))
        classes = [str(one.getClass().getSimpleName()) for one in thrown]
        if any(found in _MISSING for found in classes):
            raise InvalidArgument(missing(session, name)) from error
        if "CatalogNotFoundException" in classes:
            raise InvalidArgument(
                f"Spark has no catalog {name.partition('.')[0]!r}: give the executors its settings by --spark-conf "
                f"spark.sql.catalog.{name.partition('.')[0]}=…"
            ) from error
        if any(_DERBY in str(one.getMessage()) for one in thrown):
            raise TableUnavailable(
                "Spark's embedded metastore is open in another JVM, but Derby allows only one: use a metastore server "
                "(spark.hadoop.hive.metastore.uris) or a database that allows several"
            ) from error
        text = _safe_message(thrown[-1]) if thrown else str(error).strip().split("\n")[0]
        raise TableUnavailable(f"cannot read the table {name!r} from Spark's catalog: {text}") from None


def _safe_message(cause: Any) -> str:
    """An exception's message, if it is from a server or Spark; otherwise only its class.

    Iceberg's catalogs read files by their paths, and quote files that are not metadata: a table's owner could put a
    link to any file of the executor's user into its folder.
    """
    name = str(cause.getClass().getName())
    if name.startswith(_OF_SERVERS):
        return str(cause.getMessage()).strip().split("\n")[0]
    return f"{name.rpartition('.')[2]} (its message is omitted, as it may quote a file: check the table's metadata)"


def check_name(name: str) -> None:
    """Raises InvalidArgument for a text that is not the name of a table in a catalog, such as a path."""
    found = _TABLE.fullmatch(name)
    if found is None:
        raise InvalidArgument(
            f"the location {name!r} is not the name of a table in Spark's catalog: write database.table"
        )
    if found["database"].strip("`").lower() == "global_temp":
        raise InvalidArgument(f"{name} is a temporary view, which exists in one Spark session only")


def check_catalog(session: Any, catalog: str) -> None:
    """Refuse a catalog whose server or implementation may choose code and hosts.

    To be called before Spark creates the catalog, while the session is active: a REST catalog asks its server then.
    Raises InvalidArgument, unless the executor's setting ``trusted-spark-catalogs`` lists it.
    """
    # Exactly the settings by which Spark creates the catalog.
    conf = session._jvm.org.apache.spark.sql.internal.SQLConf.get()
    settings = json.loads(_mapper(session).writeValueAsString(conf.getAllConfs()))
    trusted = settings.get(spark_rules.CONF, "").split(",")
    if catalog.lower() == _OF_SESSION:
        catalog, trusted = _OF_SESSION, [name.lower() for name in trusted]
    untrusted = "" if catalog in trusted else _untrusted_part(catalog, settings)
    if untrusted:
        raise InvalidArgument(
            f"Spark's catalog {catalog!r} is refused: {untrusted} may choose classes, hosts and where credentials are "
            "sent; register the table with --format iceberg --option catalog=…, a catalog of pyiceberg, whose answers "
            f"are filtered, or list {catalog} in the executors' setting trusted-spark-catalogs"
        )


def _untrusted_part(catalog: str, settings: Mapping[str, str]) -> str:
    """The part of a catalog that may choose code and hosts, for an error message.

    "" where the executor's settings alone choose them, or where they have no such catalog.
    """
    setting = f"spark.sql.catalog.{catalog}"
    implementation = settings.get(setting)
    if implementation is None or (catalog == _OF_SESSION and implementation == _BUILTIN):
        return ""
    # Spark and Iceberg ignore the case of an option's name, and of two spellings either one may win.
    options = [(n.removeprefix(f"{setting}.").lower(), v) for n, v in settings.items() if n.startswith(f"{setting}.")]
    unknown = [value for name, value in options if name == "catalog-impl"]
    if implementation not in _ICEBERG:
        unknown.append(implementation)
    if unknown:
        return f"its implementation {shown(unknown[0])}, which is not known,"
    types = [value for name, value in options if name == "type" and value.lower() not in _WITHOUT_SERVER]
    return f"its server (type {shown(types[0])})" if types else ""


def missing(session: Any, name: str) -> str:
    """The error text for a table that the catalog does not have."""
    text = f"Spark's catalog has no table {name!r}: it was dropped, renamed or never existed"
    if session.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory" and name.count(".") == 1:
        return f"{text} (this catalog is only in the executor's memory: {IN_MEMORY})"
    return text


def _describe(session: Any, name: str, *, partitions: bool) -> Described:
    state = session._jsparkSession.sessionState()
    parts = [str(part) for part in _listed(state.sqlParser().parseMultipartIdentifier(name))]
    catalog = parts.pop(0) if len(parts) > 2 else _OF_SESSION
    check_catalog(session, catalog)
    plugin = state.catalogManager().catalog(catalog)
    jvm = session._jvm
    if catalog.lower() == _OF_SESSION and len(parts) == 2:
        database = jvm.scala.Option.apply(parts[0])
        identifier = jvm.org.apache.spark.sql.catalyst.TableIdentifier(parts[1], database)
        # Not with loadTable, which would instantiate the class that the table's properties name.
        if state.catalog().tableExists(identifier):
            table = state.catalog().getTableMetadata(identifier)
            return _of_session_catalog(session, state, table, partitions=partitions)
    namespace = session.sparkContext._gateway.new_array(jvm.java.lang.String, len(parts) - 1)
    for n, part in enumerate(parts[:-1]):
        namespace[n] = part
    found = plugin.loadTable(jvm.org.apache.spark.sql.connector.catalog.Identifier.of(namespace, parts[-1]))
    kind = str(found.getClass().getSimpleName())
    if kind == "SparkTable" and str(found.getClass().getName()).startswith("org.apache.iceberg."):
        return Described("iceberg", metadata=str(found.table().operations().current().metadataFileLocation()))
    if kind != "V1Table":
        return Described(f"{found.name()} ({kind})")
    return _of_session_catalog(session, state, found.v1Table(), partitions=partitions)


def _of_session_catalog(session: Any, state: Any, table: Any, *, partitions: bool) -> Described:
    if str(table.tableType().name()) == "VIEW":
        return Described("view")
    provider = str(table.provider().get()).lower() if table.provider().isDefined() else "hive"
    properties = table.properties()
    if provider == "iceberg" or _get(properties, "table_type").lower() == "iceberg":
        return Described("iceberg", metadata=_get(properties, "metadata_location"))
    if provider == "hive":
        serde = table.storage().serde()
        name = str(serde.get()) if serde.isDefined() else ""
        provider = "parquet" if "parquet" in name.lower() else f"hive ({name.rpartition('.')[2] or 'without a serde'})"
    if provider != "parquet":
        return Described(provider)
    columns = json.loads(str(table.schema().json()))["fields"]
    of_partitions = tuple(str(name) for name in _listed(table.partitionColumnNames()))
    location = path_of(str(table.location().toString()))
    if not of_partitions or not partitions:
        return Described(provider, location, columns, of_partitions)
    if not table.tracksPartitionsInCatalog():
        raise InvalidArgument(
            f"the catalog does not track the partitions of {table.identifier().unquotedString()}, which Spark finds in "
            "the table's folder: register that folder with --format parquet"
        )
    none = session._jvm.scala.Option.empty()
    listed = json.loads(_mapper(session).writeValueAsString(state.catalog().listPartitions(table.identifier(), none)))
    known = [
        CatalogPartition(_values(one["spec"], of_partitions), path_of(one["storage"]["locationUri"])) for one in listed
    ]
    return Described(provider, location, columns, of_partitions, known)


def _values(spec: Mapping[str, str | None], names: Sequence[str]) -> dict[str, str | None]:
    """The values in the order of the partition columns, whose names a metastore has in lower case."""
    lower = {name.lower(): value for name, value in spec.items()}
    return {name: lower[name.lower()] for name in names}


def path_of(uri: str) -> str:
    """A location of the catalog in the form of a table record: a path for a local URI, and without URI escapes."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return unquote(parts.path) if parts.scheme else uri
    return f"{parts.scheme}://{parts.netloc}{unquote(parts.path)}"


def _mapper(session: Any) -> Any:
    """A mapper that writes Scala's collections and case classes as JSON, to read 100,000 partitions in one call."""
    jackson = session._jvm.com.fasterxml.jackson
    mapper = jackson.databind.ObjectMapper()
    mapper.registerModule(jackson.module.scala.DefaultScalaModule())
    return mapper


def _listed(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    for n in range(sequence.size()):
        yield sequence.apply(n)


def _get(properties: Any, key: str) -> str:
    found = properties.get(key)
    return str(found.get()) if found.isDefined() else ""
