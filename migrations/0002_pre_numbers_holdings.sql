-- Version numbers that are never used twice, what a tenant holds in one row, and tenants that are deleted in batches.

-- Newest version number of each adapter that was deleted. An adapter of the same name goes on from there.
CREATE TABLE adapter_numbers (
    tenant_id    text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name         text NOT NULL,
    last_version integer NOT NULL,
    PRIMARY KEY (tenant_id, name)
);

-- Number of adapters and bytes of contents that a tenant has, each content once: what `adapters` and `adapter_bytes`
-- of its quota limit. A tenant has a row once it was asked for; the trigger `count_held` keeps it.
CREATE TABLE tenant_holdings (
    tenant_id text PRIMARY KEY REFERENCES tenants ON DELETE CASCADE,
    adapters  bigint NOT NULL,
    bytes     bigint NOT NULL
);

-- Time of deletion. The tenant has no name and no keys since, and the reaper deletes its adapters and then this row.
ALTER TABLE tenants ADD COLUMN deleted_at timestamptz;
CREATE INDEX tenants_deleted ON tenants (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE FUNCTION keep_numbers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        NEW.last_version := greatest(NEW.last_version, (
            SELECT last_version FROM adapter_numbers WHERE (tenant_id, name) = (NEW.tenant_id, NEW.name)));
        RETURN NEW;
    END IF;
    INSERT INTO adapter_numbers AS n (tenant_id, name, last_version)
        SELECT id, OLD.name, OLD.last_version FROM tenants WHERE id = OLD.tenant_id AND deleted_at IS NULL
        ON CONFLICT (tenant_id, name) DO UPDATE SET last_version = greatest(n.last_version, excluded.last_version);
    RETURN NULL;
END $$;
CREATE TRIGGER numbers_begin BEFORE INSERT ON adapters FOR EACH ROW EXECUTE FUNCTION keep_numbers();
CREATE TRIGGER numbers_stay AFTER DELETE ON adapters FOR EACH ROW EXECUTE FUNCTION keep_numbers();

-- Returns what the tenant has, from its row or else from its versions.
CREATE FUNCTION holdings_of(of_tenant text) RETURNS tenant_holdings LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_row tenant_holdings%ROWTYPE;
BEGIN
    SELECT * INTO found_row FROM tenant_holdings WHERE tenant_id = of_tenant;
    IF NOT FOUND THEN
        WITH held AS (
            SELECT name, digest, (manifest ->> 'file_bytes')::bigint AS bytes FROM adapter_versions
            WHERE tenant_id = of_tenant AND state NOT IN ('rejected', 'retired')
        )
        SELECT of_tenant, count(DISTINCT name),
               (SELECT coalesce(sum(bytes), 0)::bigint FROM (SELECT DISTINCT digest, bytes FROM held) contents)
            INTO found_row FROM held;
    END IF;
    RETURN found_row;
END $$;

-- Stores what the tenant has, unless it is stored. Locks the catalog, as everything does that changes a version.
CREATE FUNCTION store_holdings(of_tenant text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    IF NOT EXISTS (SELECT FROM tenant_holdings WHERE tenant_id = of_tenant) THEN
        INSERT INTO tenant_holdings SELECT (holdings_of(of_tenant)).*;
    END IF;
END $$;

-- Runs before each row, so that of several rows that a statement changes, the last one sees that no other is left.
CREATE FUNCTION count_held() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was  boolean := TG_OP <> 'INSERT' AND OLD.state NOT IN ('rejected', 'retired');
    held boolean := TG_OP <> 'DELETE' AND NEW.state NOT IN ('rejected', 'retired');
    one  adapter_versions%ROWTYPE;
    step integer := held::integer - was::integer;
BEGIN
    IF step <> 0 THEN
        IF step < 0 THEN one := OLD; ELSE one := NEW; END IF;
        UPDATE tenant_holdings h
        SET adapters = h.adapters + CASE WHEN EXISTS (
                SELECT FROM adapter_versions v
                WHERE (v.tenant_id, v.name) = (one.tenant_id, one.name) AND v.version <> one.version
                    AND v.state NOT IN ('rejected', 'retired')) THEN 0 ELSE step END,
            bytes = h.bytes + CASE WHEN EXISTS (
                SELECT FROM adapter_versions v
                WHERE v.digest = one.digest AND v.tenant_id = one.tenant_id
                    AND (v.name, v.version) <> (one.name, one.version) AND v.state NOT IN ('rejected', 'retired'))
                THEN 0 ELSE step * coalesce((one.manifest ->> 'file_bytes')::bigint, 0) END
        WHERE h.tenant_id = one.tenant_id;
    END IF;
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER held BEFORE INSERT OR UPDATE OF state OR DELETE ON adapter_versions
    FOR EACH ROW EXECUTE FUNCTION count_held();

-- As in 0001, and: a tenant is deleted when `deleted_at` is set, under the name that it had. What the reaper deletes of
-- it later is not logged.
CREATE OR REPLACE FUNCTION audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    kind    text := TG_ARGV[0];
    hidden  text[] := string_to_array(TG_ARGV[2], ',');
    was     jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hidden END;
    becomes jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hidden END;
    logged  jsonb := coalesce(becomes, was);
    verb    text;
BEGIN
    IF TG_OP = 'DELETE' AND was ->> 'tenant_id' IS NOT NULL
        AND NOT EXISTS (SELECT FROM tenants WHERE id = was ->> 'tenant_id' AND deleted_at IS NULL)
        OR TG_OP = 'DELETE' AND was ->> 'deleted_at' IS NOT NULL THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        SELECT jsonb_object_agg(key, jsonb_build_array(was -> key, value)) INTO logged
            FROM jsonb_each(becomes) WHERE value IS DISTINCT FROM was -> key;
        IF logged IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    verb := CASE
        WHEN kind = 'alias' AND TG_OP = 'INSERT' THEN becomes ->> 'reason'
        WHEN kind = 'key' AND TG_OP = 'INSERT' AND becomes ->> 'replaces' IS NOT NULL THEN 'rotate'
        WHEN kind IN ('key', 'signing_key') AND TG_OP = 'UPDATE' AND logged ? 'revoked_at' THEN 'revoke'
        WHEN kind = 'tenant' AND TG_OP = 'UPDATE' AND logged ? 'deleted_at' THEN 'delete'
        WHEN kind = 'version' AND TG_OP = 'UPDATE' AND logged ? 'state' THEN becomes ->> 'state'
        ELSE (ARRAY['create', 'update', 'delete'])[array_position(ARRAY['INSERT', 'UPDATE', 'DELETE'], TG_OP)] END;
    IF kind = 'tenant' THEN
        logged := (CASE verb WHEN 'delete' THEN was ELSE logged END) - 'deleted_at';
    END IF;
    INSERT INTO audit_log (tenant_id, action, object, details)
    SELECT CASE kind WHEN 'tenant' THEN whole ->> 'id' ELSE whole ->> 'tenant_id' END,
           kind || '.' || verb,
           (SELECT string_agg(whole ->> part, '@' ORDER BY place)
            FROM unnest(string_to_array(TG_ARGV[1], ',')) WITH ORDINALITY AS p (part, place)),
           logged
    FROM coalesce(becomes, was) AS whole;
    RETURN NULL;
END $$;

DO $$
DECLARE
    privileged regprocedure;
BEGIN
    FOREACH privileged IN ARRAY ARRAY[
        'audit_change()', 'keep_numbers()', 'count_held()', 'store_holdings(text)']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', privileged, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', privileged);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO loraplex_app', privileged);
    END LOOP;
END $$;

ALTER TABLE tenant_holdings ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON tenant_holdings TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) IN ('*', tenant_id));
ALTER TABLE adapter_numbers ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON adapter_numbers TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) IN ('*', tenant_id));
-- Written only by functions.
GRANT SELECT ON tenant_holdings, adapter_numbers TO loraplex_app;
-- A deleted tenant has no holdings.
GRANT DELETE ON tenant_holdings TO loraplex_app;
