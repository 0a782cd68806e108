-- Usage is loaded by a function, so that the role of the planes needs no right to change sums of usage. The right is
-- revoked after the roll-out, because the previous version loads usage with statements of its own.

-- Adds usage, [{request_id, admitted_at, ...}], and subtracts it from those leases of its gateway from which it was
-- reserved. Bit n of `leased` is set if the limit with `place` n was leased. Ignores rows that are already stored, and
-- rows of days that are no longer kept.
CREATE FUNCTION usage_load(rows jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM jsonb_to_recordset(rows) AS r (
            metered_tokens bigint, cost bigint, input_cost bigint, cached_input_cost bigint, output_cost bigint)
        WHERE least(metered_tokens, cost, input_cost, cached_input_cost, output_cost) < 0)
    THEN
        RAISE EXCEPTION 'usage is negative' USING ERRCODE = 'check_violation', CONSTRAINT = 'usage_not_negative';
    END IF;
    WITH inserted AS (
        INSERT INTO usage (
            day, request_id, admitted_at, tenant_id, key_id, model, adapter, adapter_version, prompt_tokens, cached_tokens,
            completion_tokens, ttft_ms, duration_ms, finish_reasons, worker, trace_id, status, gateway, metered_tokens, cost,
            input_cost, cached_input_cost, output_cost)
        SELECT (to_timestamp(r.admitted_at) AT TIME ZONE 'UTC')::date AS day, r.request_id, to_timestamp(r.admitted_at),
               r.tenant_id, r.key_id, r.model, r.adapter, r.adapter_version, r.prompt_tokens, r.cached_tokens,
               r.completion_tokens, r.ttft_ms, r.duration_ms, r.finish_reasons, r.worker, r.trace_id, r.status,
               r.gateway, r.metered_tokens, r.cost, r.input_cost, r.cached_input_cost, r.output_cost
        FROM jsonb_to_recordset(rows) AS r (
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
        FROM spent JOIN jsonb_to_recordset(rows) AS r (request_id text, leased integer) USING (request_id),
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
END $$;

-- As in 0001, and in this schema: another one of the database may have a table of the same name.
CREATE OR REPLACE FUNCTION usage_make_partition(of_day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    made text := format('usage_%s', to_char(of_day, 'YYYYMMDD'));
BEGIN
    IF to_regclass(made) IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM FROM usage_kept FOR UPDATE; -- one at a time
    -- Not to_regclass: it may remember from before the wait that there is none.
    IF NOT EXISTS (
        SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relname = made AND n.nspname = current_schema()) THEN
        -- Made first and then attached, which keeps nobody from reading or loading.
        EXECUTE format('CREATE TABLE %I (LIKE usage INCLUDING ALL)', made);
        EXECUTE format('ALTER TABLE usage ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', made, of_day, of_day + 1);
    END IF;
END $$;

DO $$
DECLARE
    privileged regprocedure;
BEGIN
    FOREACH privileged IN ARRAY ARRAY[
        'usage_load(jsonb)', 'usage_make_partition(date)', 'quota_upkeep()',
        'usage_reprice(text,text,timestamptz,timestamptz,bigint,bigint,bigint)']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', privileged, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', privileged);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO loraplex_app', privileged);
    END LOOP;
END $$;
