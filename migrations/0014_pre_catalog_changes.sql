-- Gateways load of the catalog the part of those tenants that have changed since they did last.

CREATE TABLE catalog_changes (
    tenant_id  text PRIMARY KEY, -- stays when the tenant goes, for its part must go too
    generation bigint NOT NULL   -- of the catalog, when the last of its changes was made
);
INSERT INTO catalog_changes (tenant_id, generation)
SELECT id, generation FROM tenants, catalog_generation;

-- Each runs behind a_bump, whose lock makes one change follow the other.
CREATE FUNCTION note_tenant_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.id, generation FROM changed, catalog_generation ORDER BY 1
    ON CONFLICT (tenant_id) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

CREATE FUNCTION note_change_of_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.tenant_id, generation FROM changed, catalog_generation
    WHERE changed.tenant_id IS NOT NULL -- an admin key is nobody's, and always loaded
    ORDER BY 1
    ON CONFLICT (tenant_id) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- Whoever has a version of the content.
CREATE FUNCTION note_proof() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT v.tenant_id, generation FROM changed JOIN adapter_versions v USING (digest), catalog_generation
    ORDER BY 1
    ON CONFLICT (tenant_id) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- Whose tenant a change is of, is not always its author's to see.
DO $$
DECLARE
    noting regprocedure;
BEGIN
    FOREACH noting IN ARRAY ARRAY['note_tenant_change()', 'note_change_of_tenant()', 'note_proof()']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', noting, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', noting);
    END LOOP;
END $$;

DO $$
DECLARE
    noted record;
    event text;
    rows  text;
BEGIN
    FOR noted IN
        SELECT * FROM (VALUES
            ('tenants', 'note_tenant_change'),
            ('api_keys', 'note_change_of_tenant'),
            ('adapter_versions', 'note_change_of_tenant'),
            ('aliases', 'note_change_of_tenant'),
            ('canary_targets', 'note_change_of_tenant'),
            ('quotas', 'note_change_of_tenant'),
            ('adapter_proofs', 'note_proof') -- whose rows go when no version has the content
        ) AS t (name, function)
    LOOP
        FOREACH event IN ARRAY ARRAY['INSERT', 'UPDATE', 'DELETE']
        LOOP
            rows := CASE event WHEN 'DELETE' THEN 'OLD' ELSE 'NEW' END;
            EXECUTE format(
                'CREATE TRIGGER note_%s AFTER %s ON %I REFERENCING %s TABLE AS changed
                 FOR EACH STATEMENT EXECUTE FUNCTION %I()',
                lower(event), event, noted.name, rows, noted.function);
        END LOOP;
    END LOOP;
END $$;

GRANT SELECT ON catalog_changes TO loraplex_app;
ALTER TABLE catalog_changes ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON catalog_changes TO loraplex_app USING (
    (SELECT current_setting('loraplex.tenant', true)) = '*'
    OR tenant_id = (SELECT current_setting('loraplex.tenant', true)));
