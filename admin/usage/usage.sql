-- name: usage_make_room
-- $1: rows as `usage_load` takes them. Creates a partition for each of their days that is still kept.
SELECT usage_make_partition(day)
FROM (SELECT DISTINCT (to_timestamp(admitted_at) AT TIME ZONE 'UTC')::date AS day
      FROM jsonb_to_recordset($1) AS r (admitted_at double precision)) days
WHERE day >= (SELECT first_day FROM usage_kept)
ORDER BY day;

-- name: usage_load
-- $1: [{request_id, admitted_at, ...}].
SELECT usage_load($1);

-- name: usage_check
-- $1: a day (UTC). Returns the number of hourly sums of the day that differ from its rows, or 0 if its rows are no
-- longer kept. Credits lowered a sum's cost after it was recorded.
WITH loaded AS (
    SELECT date_trunc('hour', admitted_at, 'UTC') AS hour, tenant_id, model, coalesce(adapter, '') AS adapter,
           coalesce(adapter_version, 0) AS adapter_version, key_id, count(*) AS requests,
           sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens,
           sum(completion_tokens) AS completion_tokens, sum(metered_tokens) AS metered_tokens, sum(cost) AS cost
    FROM usage WHERE day = $1 GROUP BY 1, 2, 3, 4, 5, 6
), summed AS (
    SELECT hour, tenant_id, model, adapter, adapter_version, key_id, requests, prompt_tokens, cached_tokens,
           completion_tokens, metered_tokens, cost + credited AS cost
    FROM usage_hourly
    WHERE hour >= $1::date::timestamp AT TIME ZONE 'UTC' AND hour < ($1::date + 1)::timestamp AT TIME ZONE 'UTC'
)
SELECT count(*) FROM loaded l FULL JOIN summed s USING (hour, tenant_id, model, adapter, adapter_version, key_id)
WHERE $1 >= (SELECT first_day FROM usage_kept)
    AND (l.requests, l.prompt_tokens, l.cached_tokens, l.completion_tokens, l.metered_tokens, l.cost)
        IS DISTINCT FROM (s.requests, s.prompt_tokens, s.cached_tokens, s.completion_tokens, s.metered_tokens, s.cost);

-- name: usage_days
-- Returns the days whose usage rows are all kept, the newest first.
SELECT generate_series((now() AT TIME ZONE 'UTC')::date, greatest(first_day, (
    SELECT coalesce(min(to_date(right(inhrelid::regclass::text, 8), 'YYYYMMDD')), current_date) FROM pg_inherits
    WHERE inhparent = 'usage'::regclass)), '-1 day')::date AS day
FROM usage_kept;

-- name: usage_late
-- $1: rows as `usage_load` takes them. Returns the number of rows that `usage_load` ignores because their days are no
-- longer kept.
SELECT count(*) FROM jsonb_to_recordset($1) AS r (admitted_at double precision)
WHERE (to_timestamp(admitted_at) AT TIME ZONE 'UTC')::date < (SELECT first_day FROM usage_kept);

-- name: usage_upkeep
-- $1: number of days to keep, including today. Creates the partitions of today and the next two days, drops the days
-- that are no longer kept, and returns the number of dropped days.
SELECT usage_make_partition(today), usage_make_partition(today + 1), usage_make_partition(today + 2),
       usage_drop_before(today - $1::integer + 1) AS dropped
FROM (SELECT (now() AT TIME ZONE 'UTC')::date AS today) now;

-- name: usage_report
-- Sums usage in time buckets. $1, $2: first hour and end (exclusive); $3: 'hour' or 'day'; $4-$6: tenant ids, models
-- and key ids to select, each null for all; $7-$11: whether to group by tenant, model, adapter, adapter version and
-- key; $12-$17: bucket, tenant, model, adapter, version and key of the previous page's last row, or nulls; $18: limit,
-- or null.
SELECT start, tenant_id, model, adapter, adapter_version, key_id, sum(requests)::bigint AS requests,
       sum(prompt_tokens)::bigint AS prompt_tokens, sum(cached_tokens)::bigint AS cached_tokens,
       sum(completion_tokens)::bigint AS completion_tokens, sum(metered_tokens)::bigint AS metered_tokens,
       sum(cost) AS cost, sum(input_cost) AS input_cost, sum(cached_input_cost) AS cached_input_cost,
       sum(output_cost) AS output_cost, sum(credited) AS credited
FROM (SELECT date_trunc($3, hour, 'UTC') AS start,
             CASE WHEN $7::boolean THEN tenant_id ELSE '' END AS tenant_id,
             CASE WHEN $8::boolean THEN model ELSE '' END AS model,
             CASE WHEN $9::boolean THEN adapter ELSE '' END AS adapter,
             CASE WHEN $10::boolean THEN adapter_version ELSE 0 END AS adapter_version,
             CASE WHEN $11::boolean THEN key_id ELSE '' END AS key_id,
             requests, prompt_tokens, cached_tokens, completion_tokens, metered_tokens, cost, input_cost,
             cached_input_cost, output_cost, credited
      FROM usage_hourly
      WHERE hour >= greatest($1, $12::timestamptz) AND hour < $2
          AND ($4::text[] IS NULL OR tenant_id = ANY ($4))
          AND ($5::text[] IS NULL OR model = ANY ($5))
          AND ($6::text[] IS NULL OR key_id = ANY ($6))) told
WHERE $12::timestamptz IS NULL
    OR (start, tenant_id, model, adapter, adapter_version, key_id)
        > ($12::timestamptz, $13::text, $14::text, $15::text, $16::integer, $17::text)
GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6 LIMIT $18;

-- name: usage_report_minutes
-- Sums the usage rows that are still kept by minute, without credits. $1, $2: first minute and end (exclusive); $3-$5:
-- tenant ids, models and key ids to select, each null for all; $6-$10: whether to group by tenant, model, adapter,
-- adapter version and key; $11: limit, or null.
SELECT start, tenant_id, model, adapter, adapter_version, key_id, count(*) AS requests,
       sum(prompt_tokens)::bigint AS prompt_tokens, sum(cached_tokens)::bigint AS cached_tokens,
       sum(completion_tokens)::bigint AS completion_tokens, sum(metered_tokens)::bigint AS metered_tokens,
       sum(cost) AS cost, sum(input_cost) AS input_cost, sum(cached_input_cost) AS cached_input_cost,
       sum(output_cost) AS output_cost
FROM (SELECT date_trunc('minute', admitted_at, 'UTC') AS start,
             CASE WHEN $6::boolean THEN tenant_id ELSE '' END AS tenant_id,
             CASE WHEN $7::boolean THEN model ELSE '' END AS model,
             CASE WHEN $8::boolean THEN coalesce(adapter, '') ELSE '' END AS adapter,
             CASE WHEN $9::boolean THEN coalesce(adapter_version, 0) ELSE 0 END AS adapter_version,
             CASE WHEN $10::boolean THEN key_id ELSE '' END AS key_id,
             prompt_tokens, cached_tokens, completion_tokens, metered_tokens, cost, input_cost, cached_input_cost,
             output_cost
      FROM usage
      WHERE admitted_at >= $1 AND admitted_at < $2
          -- Repeats the condition on the partition key, so that PostgreSQL reads only the partitions of these days.
          AND day >= ($1 AT TIME ZONE 'UTC')::date AND day <= ($2 AT TIME ZONE 'UTC')::date
          AND ($3::text[] IS NULL OR tenant_id = ANY ($3))
          AND ($4::text[] IS NULL OR model = ANY ($4))
          AND ($5::text[] IS NULL OR key_id = ANY ($5))) told
GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6 LIMIT $11;

-- name: usage_reprice
-- $1: model; $2: tenant id, or null for all; $3, $4: first hour and end (exclusive); $5-$7: prices of input, cached
-- input and output.
SELECT requests, cost_before, cost_after, raised FROM usage_reprice($1, $2, $3, $4, $5, $6, $7);

-- name: credit_insert
INSERT INTO usage_credits (requests, cost_before, cost_after, {columns of admin.usage.credits.CreditFields})
VALUES ($1, $2, $3, {values of admin.usage.credits.CreditFields});

-- name: credit_find
SELECT {columns of admin.usage.credits.Credit} FROM usage_credits WHERE id = $1;

-- name: credit_list
SELECT {columns of admin.usage.credits.Credit} FROM usage_credits WHERE id > $1 ORDER BY id LIMIT $2;
