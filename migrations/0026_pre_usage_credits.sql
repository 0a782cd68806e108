-- Corrections of a wrong price in what was recorded, and how much of a cost each took off.

ALTER TABLE usage_hourly ADD COLUMN credited numeric NOT NULL DEFAULT 0; -- taken off `cost` since

-- The operators': one correction may concern all tenants.
CREATE TABLE usage_credits (
    id           entity_name PRIMARY KEY, -- chosen by the client, so that a repeat changes nothing
    model        text NOT NULL,           -- no foreign key, as in usage
    tenant_id    text,                    -- null: every tenant
    since        timestamptz NOT NULL,
    until        timestamptz NOT NULL CHECK (since < until),
    input        bigint NOT NULL,         -- the right price, as in prices
    cached_input bigint NOT NULL,
    output       bigint NOT NULL,
    reason       text NOT NULL CHECK (length(reason) BETWEEN 1 AND 1000),
    requests     bigint NOT NULL,
    cost_before  numeric NOT NULL, -- pico-dollars
    cost_after   numeric NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE usage_credits ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON usage_credits TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) = '*');
GRANT SELECT, INSERT ON usage_credits TO loraplex_app;
CREATE TRIGGER audit AFTER INSERT ON usage_credits
    FOR EACH ROW EXECUTE FUNCTION audit_change('credit', 'id', '');

-- Sets the costs of a model's hours to what these prices make them. `raised` is the first hour that would then cost more
-- than when it was recorded. In that case nothing is changed.
CREATE FUNCTION usage_reprice(
    of_model text, of_tenant text, since timestamptz, until timestamptz, price_input bigint,
    price_cached_input bigint, price_output bigint,
    OUT requests bigint, OUT cost_before numeric, OUT cost_after numeric, OUT raised timestamptz)
    LANGUAGE plpgsql AS $$
BEGIN
    -- Loading usage locks totals before hours. Without this lock, each could wait for the other.
    LOCK TABLE usage_totals IN SHARE ROW EXCLUSIVE MODE;
    WITH priced AS (
        SELECT *, new_input + new_cached_input + new_output AS new_cost
        FROM (SELECT h.*, (h.prompt_tokens - h.cached_tokens)::numeric * price_input AS new_input,
                     h.cached_tokens::numeric * price_cached_input AS new_cached_input,
                     h.completion_tokens::numeric * price_output AS new_output
              FROM usage_hourly h
              WHERE h.model = of_model AND h.hour >= since AND h.hour < until
                  AND (of_tenant IS NULL OR h.tenant_id = of_tenant)) hours
    ), sums AS (
        SELECT sum(p.requests)::bigint AS requests, sum(p.cost) AS cost, sum(p.new_cost) AS new_cost,
               min(p.hour) FILTER (WHERE p.new_cost > p.cost + p.credited) AS first_raised
        FROM priced p
    ), changed AS (
        UPDATE usage_hourly h
        SET cost = p.new_cost, input_cost = p.new_input, cached_input_cost = p.new_cached_input,
            output_cost = p.new_output, credited = p.credited + p.cost - p.new_cost
        FROM priced p, sums
        WHERE sums.first_raised IS NULL
            AND (h.hour, h.tenant_id, h.model, h.adapter, h.adapter_version, h.key_id)
                = (p.hour, p.tenant_id, p.model, p.adapter, p.adapter_version, p.key_id)
        RETURNING p.hour, p.tenant_id, p.key_id, p.cost - p.new_cost AS amount
    ), totals AS (
        UPDATE usage_totals t SET cost = t.cost - c.amount
        FROM (SELECT s.subject, p.span, date_trunc(p.span, changed.hour AT TIME ZONE 'UTC')::date AS start,
                     sum(changed.amount) AS amount
              FROM changed LEFT JOIN api_keys k ON k.id = changed.key_id,
                  LATERAL (VALUES (changed.tenant_id), (coalesce(k.family, changed.key_id))) AS s (subject),
                  (VALUES ('day'), ('month')) AS p (span)
              GROUP BY 1, 2, 3) c
        WHERE (t.subject, t.span, t.start) = (c.subject, c.span, c.start)
    )
    SELECT sums.requests, sums.cost, sums.new_cost, sums.first_raised FROM sums
        INTO requests, cost_before, cost_after, raised;
END $$;
