"""The functions that a submitted expression may call: they compute one value from the values of one row.

Each is deterministic and reads only its arguments: no file, table, clock, user name or host name. None creates a value
whose size is an argument (``repeat``, ``sequence``, ``array_repeat``, ``format_string``), except those of
:data:`BOUNDED`. None takes a type as text (``from_json``, ``variant_get``): a type in JSON can name Java classes, which
Spark loads.
"""

from __future__ import annotations

_CONDITIONS = """
between coalesce equal_null if ifnull ilike isnan isnotnull isnull like nanvl nullif nullifzero nvl nvl2 regexp
regexp_like rlike zeroifnull
"""
_NUMBERS = """
abs acos acosh asin asinh atan atan2 atanh bin bit_count bit_get bround cbrt ceil ceiling conv cos cosh cot csc degrees
e exp expm1 factorial floor getbit greatest hex hypot least ln log log10 log1p log2 mod negative pi pmod positive pow
power radians rint round sec shiftleft shiftright shiftrightunsigned sign signum sin sinh sqrt tan tanh try_add
try_divide try_mod try_multiply try_subtract unhex width_bucket
"""
_CASTS = "bigint binary boolean date decimal double float int smallint string time timestamp tinyint"
_TIMES = """
add_months date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart
day dayname dayofmonth dayofweek dayofyear extract from_unixtime from_utc_timestamp hour last_day make_date
make_dt_interval make_interval make_time make_timestamp make_timestamp_ltz make_timestamp_ntz make_ym_interval minute
month monthname months_between next_day quarter second time_diff time_trunc timestamp_micros timestamp_millis
timestamp_seconds to_date to_time to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp
trunc try_make_interval try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_to_date try_to_time
try_to_timestamp unix_date unix_micros unix_millis unix_seconds weekday weekofyear year
"""
_TEXTS = """
ascii base64 bit_length btrim char char_length character_length chr collate collation concat concat_ws contains decode
elt encode endswith find_in_set initcap instr is_valid_utf8 lcase left len length levenshtein locate lower lpad ltrim
luhn_check make_valid_utf8 mask octet_length overlay parse_url position regexp_count regexp_extract regexp_extract_all
regexp_instr regexp_replace regexp_substr replace reverse right rpad rtrim soundex split split_part startswith substr
substring substring_index to_binary to_char to_number to_varchar translate trim try_parse_url try_to_binary
try_to_number try_url_decode try_validate_utf8 ucase unbase64 upper url_decode url_encode validate_utf8
"""
_DIGESTS = "crc32 hash md5 sha sha1 sha2 xxhash64"
_JSON = """
get_json_object is_variant_null json_array_length json_object_keys parse_json schema_of_json to_json
try_parse_json
"""
_COLLECTIONS = """
aggregate array array_append array_compact array_contains array_distinct array_except array_intersect array_join
array_max array_min array_position array_prepend array_remove array_size array_sort array_union arrays_overlap
arrays_zip cardinality element_at exists filter flatten forall get map map_concat map_contains_key map_entries
map_filter map_from_arrays map_from_entries map_keys map_values map_zip_with named_struct reduce size slice sort_array
str_to_map struct transform transform_keys transform_values try_element_at zip_with
"""
_GROUPS = (_CONDITIONS, _NUMBERS, _CASTS, _TIMES, _TEXTS, _DIGESTS, _JSON, _COLLECTIONS)

ROW_FUNCTIONS: frozenset[str] = frozenset(name for group in _GROUPS for name in group.split())
"""The names in lower case."""
BOUNDED = {"round": 2, "bround": 2, "ceil": 2, "ceiling": 2, "floor": 2, "lpad": 4, "rpad": 4}
"""Functions whose second argument chooses a size: it must be a number with at most this many digits, or left out."""
