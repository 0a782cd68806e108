-- What each request used: one row each, by day, and their sums by hour.

-- No foreign keys: what was used is owed even if the key, the adapter or the tenant is gone.
CREATE TABLE usage (
    day               date NOT NULL, -- of admission, UTC
    request_id        text NOT NULL,
    admitted_at       timestamptz NOT NULL,
    tenant_id         text NOT NULL,
    key_id            text NOT NULL,
    model             text NOT NULL, -- served name of the base model
    adapter           text,          -- null: the base model alone
    adapter_version   integer,
    prompt_tokens     bigint NOT NULL CHECK (prompt_tokens >= 0),
    cached_tokens     bigint NOT NULL CHECK (cached_tokens BETWEEN 0 AND prompt_tokens), -- of the prompt
    completion_tokens bigint NOT NULL CHECK (completion_tokens >= 0),
    ttft_ms           double precision,
    duration_ms       double precision NOT NULL,
    finish_reasons    text[] NOT NULL, -- one a choice; null: it was not finished
    worker            text NOT NULL,
    trace_id          text,
    status            text NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled')),
    PRIMARY KEY (day, request_id)
) PARTITION BY RANGE (day);
CREATE INDEX usage_admitted ON usage (admitted_at);
CREATE INDEX usage_tenant ON usage (tenant_id, admitted_at);

-- Sums of all rows there ever were, those of days that are not kept any more too.
CREATE TABLE usage_hourly (
    hour              timestamptz NOT NULL,
    tenant_id         text NOT NULL,
    model             text NOT NULL,
    adapter           text NOT NULL, -- '': the base model alone
    key_id            text NOT NULL,
    requests          bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    cached_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    PRIMARY KEY (hour, tenant_id, model, adapter, key_id)
);
CREATE INDEX usage_hourly_tenant ON usage_hourly (tenant_id, hour);

-- One row. Nothing of an earlier day is taken any more: whether it was counted cannot be known.
CREATE TABLE usage_kept (
    one       boolean PRIMARY KEY DEFAULT true CHECK (one),
    first_day date NOT NULL
);
INSERT INTO usage_kept (first_day) VALUES ('-infinity');

CREATE FUNCTION usage_make_partition(of_day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    made text := format('usage_%s', to_char(of_day, 'YYYYMMDD'));
BEGIN
    IF to_regclass(made) IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM FROM usage_kept FOR UPDATE; -- one at a time
    -- Not to_regclass: it may remember from before the wait that there is none.
    IF NOT EXISTS (SELECT FROM pg_class WHERE relname = made) THEN
        -- Made first and then attached, which keeps nobody from reading or loading.
        EXECUTE format('CREATE TABLE %I (LIKE usage INCLUDING ALL)', made);
        EXECUTE format('ALTER TABLE usage ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', made, of_day, of_day + 1);
    END IF;
END $$;

-- Returns how many days were dropped.
CREATE FUNCTION usage_drop_before(of_day date) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    doomed  text;
    dropped integer := 0;
BEGIN
    PERFORM set_config('lock_timeout', '5s', true);
    UPDATE usage_kept SET first_day = greatest(first_day, of_day);
    FOR doomed IN
        SELECT inhrelid::regclass::text FROM pg_inherits
        WHERE inhparent = 'usage'::regclass
            AND inhrelid::regclass::text < format('usage_%s', to_char(of_day, 'YYYYMMDD'))
        ORDER BY 1
    LOOP
        EXECUTE format('DROP TABLE %s', doomed);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END $$;
