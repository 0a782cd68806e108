-- Of a tenant with thousands of adapters, too, gateways load what has changed alone.

ALTER TABLE catalog_changes
    ADD COLUMN name text NOT NULL DEFAULT '', -- of the adapter; '': what is the tenant's beside its adapters
    DROP CONSTRAINT catalog_changes_pkey,
    ADD PRIMARY KEY (tenant_id, name);
CREATE INDEX catalog_changes_generation ON catalog_changes (generation);

CREATE OR REPLACE FUNCTION note_tenant_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.id, generation FROM changed, catalog_generation ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION note_change_of_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.tenant_id, generation FROM changed, catalog_generation
    WHERE changed.tenant_id IS NOT NULL -- an admin key is nobody's, and always loaded
    ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

CREATE FUNCTION note_change_of_adapter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT changed.tenant_id, changed.name, generation FROM changed, catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- Whoever has a version of the content.
CREATE OR REPLACE FUNCTION note_proof() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT v.tenant_id, v.name, generation
    FROM changed JOIN adapter_versions v USING (digest), catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- Replacing a function keeps whose it is and who may call it, but not the rest of what was altered.
DO $$
DECLARE
    noting regprocedure;
BEGIN
    FOREACH noting IN ARRAY ARRAY['note_tenant_change()', 'note_change_of_tenant()',
                                  'note_change_of_adapter()', 'note_proof()']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', noting, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', noting);
    END LOOP;
END $$;

DO $$
DECLARE
    noted text;
    event text;
    rows  text;
BEGIN
    FOREACH noted IN ARRAY ARRAY['adapter_versions', 'aliases', 'canary_targets']
    LOOP
        FOREACH event IN ARRAY ARRAY['INSERT', 'UPDATE', 'DELETE']
        LOOP
            rows := CASE event WHEN 'DELETE' THEN 'OLD' ELSE 'NEW' END;
            EXECUTE format('DROP TRIGGER note_%s ON %I', lower(event), noted);
            EXECUTE format(
                'CREATE TRIGGER note_%s AFTER %s ON %I REFERENCING %s TABLE AS changed
                 FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter()',
                lower(event), event, noted, rows);
        END LOOP;
    END LOOP;
END $$;
