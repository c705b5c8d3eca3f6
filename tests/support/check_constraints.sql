-- numbers
amount > 0
amount >= 0 AND amount <= 1000000
price BETWEEN 0 AND 99999.99
quantity NOT BETWEEN -5 AND -1
discount >= 0 AND discount < price
rate >= 0.0 AND rate <= 1.0
(low <= high)
low IS NULL OR high IS NULL OR low < high
score IN (1, 2, 3, 4, 5)
score % 5 = 0
mod(quantity, 2) = 0
quantity DIV 12 >= 0
total = amount + tax
abs(total - (amount + tax)) < 0.01
round(price, 2) = price
ceil(rate) <= 1
sign(amount) >= 0
quantity > 0 OR status = 'cancelled'
power(2, 3) > score
NOT isnan(price)
greatest(low, high, score) < 1000
least(low, high) >= 0
-90 <= lat AND lat <= 90 AND lon BETWEEN -180 AND 180
sqrt(lat * lat + lon * lon) < 200
quantity & 1 = 0
`order` >= 0
`weird name` <> 0
id <> parent_id
id > 0 AND (parent_id IS NULL OR parent_id <> id)
1.5e3 > score AND 10BD < 11.0BD
-- texts
email LIKE '%_@_%._%'
email NOT LIKE '% %'
email RLIKE '^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+[.][A-Za-z]{2,}$'
regexp_like(email, '^[^@]+@[^@]+$')
length(name) > 0
length(trim(name)) >= 2
char_length(code) = 3
character_length(zip) IN (5, 10)
octet_length(note) <= 4000
upper(code) = code
lower(email) = email
code = upper(trim(code))
name <> ''
trim(BOTH ' ' FROM name) = name
substring(iban, 1, 2) RLIKE '^[A-Z]{2}$'
substring(iban FROM 3 FOR 2) RLIKE '^[0-9]+$'
left(phone, 1) = '+'
right(code, 1) <> '-'
position('@' IN email) > 1
instr(email, '@') > 1
startswith(url, 'https://') OR startswith(url, 'http://')
url ILIKE 'https://%'
slug RLIKE '^[a-z0-9]+(-[a-z0-9]+)*$'
replace(phone, ' ', '') RLIKE '^[+]?[0-9]{6,15}$'
regexp_replace(phone, '[^0-9]', '') <> ''
split_part(email, '@', 2) <> ''
size(split(ip, '[.]')) = 4
name || ' ' || code <> ' '
concat(country, '-', code) LIKE '__-%'
concat_ws('/', country, currency) <> ''
uuid_text RLIKE '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
hash_text = sha2(note, 256) OR hash_text IS NULL
lpad(code, 5, '0') = code
translate(code, '0123456789', '') = ''
note LIKE ANY ('A%', 'B%') OR note IS NULL
note NOT LIKE ALL ('%select(%', '%drop table%')
code LIKE '10/%%' ESCAPE '/'
note <> 'a quote '' or \' and (parentheses'
luhn_check(code) OR code IS NULL
initcap(name) = name
ascii(code) BETWEEN 65 AND 90
-- sets, cases, NULLs
status IN ('new', 'paid', 'shipped', 'cancelled')
country NOT IN ('XX', 'ZZ')
(status, currency) IN (('paid', 'EUR'), ('paid', 'USD'), ('new', 'EUR'))
COALESCE(amount, 0) + COALESCE(tax, 0) > 0
nullif(trim(name), '') IS NOT NULL
nvl(discount, 0) <= 100
(email IS NULL) <> (phone IS NULL)
int(email IS NOT NULL) + int(phone IS NOT NULL) = 1
CASE WHEN status = 'paid' THEN amount > 0 ELSE TRUE END
CASE country WHEN 'DE' THEN length(zip) = 5 WHEN 'NL' THEN length(zip) = 6 ELSE zip IS NOT NULL END
if(deleted, deleted_at IS NOT NULL, deleted_at IS NULL)
NOT deleted OR deleted_at IS NOT NULL
active IS TRUE OR deleted IS NOT FALSE
deleted = (deleted_at IS NOT NULL)
status <=> 'new' OR amount IS NOT NULL
status IS DISTINCT FROM 'unknown'
status = 'new' /* (not yet paid) */ OR amount > 0 -- or paid (all of it)
`user` IS NOT NULL AND user <> 'root'
-- dates and times
start_date <= end_date
end_date IS NULL OR end_date > start_date
updated >= created
born >= DATE '1900-01-01'
created > TIMESTAMP '2000-01-01 00:00:00'
year(born) > 1900
extract(MONTH FROM start_date) BETWEEN 1 AND 12
date_part('dow', start_date) <> 1
dayofweek(start_date) NOT IN (1, 7)
datediff(end_date, start_date) <= 366
end_date <= start_date + INTERVAL '1' YEAR
updated - created < INTERVAL '30' DAY
date_trunc('day', created) = created
start_date = last_day(start_date) OR day(start_date) = 1
make_date(year, month, day) = start_date
try_to_date(code, 'yyyyMMdd') IS NOT NULL OR code IS NULL
hour(created) < 24 AND minute(created) < 60
born < current_date()
created <= now()
-- casts, JSON
CAST(code AS INT) > 0
try_cast(zip AS int) IS NOT NULL
CAST(amount AS DECIMAL(10, 2)) = amount
price::decimal(12,2) >= 0
get_json_object(payload, '$.id') IS NOT NULL
try_parse_json(payload) IS NOT NULL
json_array_length(payload) >= 0
get_json_object(payload, '$.id') > 0
-- arrays, maps, structs
size(tags) BETWEEN 1 AND 10
cardinality(tags) > 0
array_contains(tags, 'x') = FALSE
tags[0] <> ''
element_at(attributes, 'size') IN ('S', 'M', 'L')
attributes['color'] IS NOT NULL
map_contains_key(attributes, 'color')
address.zip RLIKE '^[0-9]{5}$' AND address.city <> ''
forall(items, i -> i.quantity > 0 AND i.price >= 0)
NOT exists(tags, t -> t IS NULL OR trim(t) = '')
aggregate(items, 0D, (sum, i) -> sum + i.price * i.quantity) <= 1000000
size(array_distinct(tags)) = size(tags)
array_max(numbers) < 100 AND array_min(numbers) >= 0
size(filter(numbers, (n, index) -> n < index)) = 0
arrays_overlap(tags, array('new', 'old'))
raw IS NULL OR length(raw) = 16
