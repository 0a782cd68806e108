-- name: usage_make_room
-- $1: rows as `usage_load` takes them. Creates a partition for each of their days that is still kept.
SELECT usage_make_partition(day)
FROM (SELECT DISTINCT (to_timestamp(admitted_at) AT TIME ZONE 'UTC')::date AS day
      FROM jsonb_to_recordset($1) AS r (admitted_at double precision)) days
WHERE day >= (SELECT first_day FROM usage_kept)
ORDER BY day;

-- name: usage_load
-- $1: [{request_id, admitted_at, ...}]. Ignores rows that are already stored, and rows of days that are no longer kept.
-- Subtracts the usage from those leases of the gateway from which it was reserved. Bit n of `leased` is set if the
-- limit with `place` n was leased.
WITH inserted AS (
    INSERT INTO usage (
        day, request_id, admitted_at, tenant_id, key_id, model, adapter, adapter_version, prompt_tokens, cached_tokens,
        completion_tokens, ttft_ms, duration_ms, finish_reasons, worker, trace_id, status, gateway, metered_tokens, cost,
        input_cost, cached_input_cost, output_cost)
    SELECT (to_timestamp(r.admitted_at) AT TIME ZONE 'UTC')::date AS day, r.request_id, to_timestamp(r.admitted_at),
           r.tenant_id, r.key_id, r.model, r.adapter, r.adapter_version, r.prompt_tokens, r.cached_tokens,
           r.completion_tokens, r.ttft_ms, r.duration_ms, r.finish_reasons, r.worker, r.trace_id, r.status,
           r.gateway, r.metered_tokens, r.cost, r.input_cost, r.cached_input_cost, r.output_cost
    FROM jsonb_to_recordset($1) AS r (
        request_id text, admitted_at double precision, tenant_id text, key_id text, model text, adapter text,
        adapter_version integer, prompt_tokens bigint, cached_tokens bigint, completion_tokens bigint,
        ttft_ms double precision, duration_ms double precision, finish_reasons text[], worker text, trace_id text,
        status text, gateway text, metered_tokens bigint, cost bigint, input_cost bigint, cached_input_cost bigint,
        output_cost bigint)
    WHERE (to_timestamp(r.admitted_at) AT TIME ZONE 'UTC')::date >= (SELECT first_day FROM usage_kept)
    ORDER BY day, r.request_id -- the order in which all statements lock these rows
    ON CONFLICT DO NOTHING
    RETURNING day, request_id, admitted_at, tenant_id, model, adapter, adapter_version, key_id, prompt_tokens,
              cached_tokens, completion_tokens, gateway, metered_tokens, cost, input_cost, cached_input_cost,
              output_cost
), spent AS (
    SELECT i.*, coalesce(k.family, key_id) AS key_subject FROM inserted i LEFT JOIN api_keys k ON k.id = key_id
), hourly AS (
    INSERT INTO usage_hourly AS h (
        hour, tenant_id, model, adapter, adapter_version, key_id, requests, prompt_tokens, cached_tokens,
        completion_tokens, metered_tokens, cost, input_cost, cached_input_cost, output_cost)
    SELECT date_trunc('hour', admitted_at, 'UTC'), tenant_id, model, coalesce(adapter, ''), coalesce(adapter_version, 0),
           key_id, count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(metered_tokens),
           sum(cost), sum(input_cost), sum(cached_input_cost), sum(output_cost)
    FROM inserted GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6
    ON CONFLICT (hour, tenant_id, model, adapter, adapter_version, key_id) DO UPDATE
    SET requests = h.requests + excluded.requests,
        prompt_tokens = h.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = h.cached_tokens + excluded.cached_tokens,
        completion_tokens = h.completion_tokens + excluded.completion_tokens,
        metered_tokens = h.metered_tokens + excluded.metered_tokens,
        cost = h.cost + excluded.cost,
        input_cost = h.input_cost + excluded.input_cost,
        cached_input_cost = h.cached_input_cost + excluded.cached_input_cost,
        output_cost = h.output_cost + excluded.output_cost
), totals AS (
    INSERT INTO usage_totals AS t (subject, span, start, metered_tokens, cost)
    SELECT subject, span, date_trunc(span, day::timestamp)::date, sum(metered_tokens), sum(cost)
    FROM spent, LATERAL (VALUES (tenant_id), (key_subject)) AS s (subject), (VALUES ('day'), ('month')) AS p (span)
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (subject, span, start) DO UPDATE
    SET metered_tokens = t.metered_tokens + excluded.metered_tokens, cost = t.cost + excluded.cost
), charges AS (
    SELECT subject, kind, date_trunc(span, day::timestamp) AT TIME ZONE 'UTC' AS start, gateway, sum(amount) AS amount
    FROM spent JOIN jsonb_to_recordset($1) AS r (request_id text, leased integer) USING (request_id),
        LATERAL (VALUES
            (0, tenant_id, 'tokens_per_day', 'day', metered_tokens),
            (1, tenant_id, 'tokens_per_month', 'month', metered_tokens),
            (2, tenant_id, 'spend_per_day', 'day', cost),
            (3, tenant_id, 'spend_per_month', 'month', cost),
            (4, key_subject, 'tokens_per_day', 'day', metered_tokens),
            (5, key_subject, 'tokens_per_month', 'month', metered_tokens),
            (6, key_subject, 'spend_per_day', 'day', cost),
            (7, key_subject, 'spend_per_month', 'month', cost)) AS b (place, subject, kind, span, amount)
    WHERE leased & (1 << place) <> 0
    GROUP BY 1, 2, 3, 4
), locked AS (
    SELECT l.subject, l.kind, l.start, l.gateway_id, c.amount
    FROM quota_leases l JOIN charges c ON (l.subject, l.kind, l.start, l.gateway_id) = (c.subject, c.kind, c.start, c.gateway)
    ORDER BY l.subject, l.kind, l.start FOR UPDATE OF l -- the order in which all statements lock leases
)
UPDATE quota_leases l SET granted = l.granted - k.amount FROM locked k
WHERE (l.subject, l.kind, l.start, l.gateway_id) = (k.subject, k.kind, k.start, k.gateway_id);

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
