-- Which base models are to be on devices, what workers there are, and whose requests come first.

-- Beyond the traffic: pinned ones come to a device and stay there, unloaded ones leave it and stay away.
ALTER TABLE base_models
    ADD COLUMN residency text NOT NULL DEFAULT 'auto' CHECK (residency IN ('auto', 'pinned', 'unloaded'));

-- Of a tenant, for all its keys.
ALTER TABLE quotas
    ADD COLUMN weight smallint NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000), -- its part of a busy worker
    ADD COLUMN class  text NOT NULL DEFAULT 'standard' CHECK (class IN ('interactive', 'standard', 'batch')),
    ADD CONSTRAINT quotas_service CHECK (key_id IS NULL OR weight = 1 AND class = 'standard');

-- A worker is one process: who starts it again has another. Some say of themselves where they are, under a lease that
-- they renew; the others stand in the settings of gateways. Gateways report what those that they are connected to say.
CREATE TABLE workers (
    id            text PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 256),
    address       text NOT NULL CHECK (length(address) BETWEEN 1 AND 512),
    registered_at timestamptz NOT NULL DEFAULT now(),
    leased_until  timestamptz, -- null: it has not registered itself
    draining      boolean,     -- as it is wanted; null: nobody has said anything
    status        jsonb,
    reported_at   timestamptz,
    reported_by   text,        -- gateway id
    CONSTRAINT workers_reachable CHECK (
        leased_until IS NULL OR address ~ '^unix:/.'
        OR address ~ '^tcp://.+:[0-9]{1,5}$' AND substring(address FROM '[0-9]+$')::numeric < 65536)
);

-- What a gateway must know bumps the catalog; a lease that is renewed and a status do not. A row's own bump comes after
-- its change, so who changes rows others may change at the same time takes the catalog's lock first.
CREATE TRIGGER bump_insert AFTER INSERT ON workers
    FOR EACH ROW WHEN (NEW.leased_until IS NOT NULL) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_update AFTER UPDATE ON workers
    FOR EACH ROW WHEN (
        (OLD.address, OLD.leased_until IS NULL, OLD.draining)
        IS DISTINCT FROM (NEW.address, NEW.leased_until IS NULL, NEW.draining))
    EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_delete AFTER DELETE ON workers
    FOR EACH ROW WHEN (OLD.leased_until IS NOT NULL OR OLD.draining IS NOT NULL) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER UPDATE OF draining ON workers
    FOR EACH ROW EXECUTE FUNCTION audit_change('worker', 'id', 'leased_until,status,reported_at,reported_by');

-- The operators': a status names adapters of all tenants.
ALTER TABLE workers ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON workers TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) = '*');
GRANT SELECT, INSERT, UPDATE, DELETE ON workers TO loraplex_app;
