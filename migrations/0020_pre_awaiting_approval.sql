-- A version whose chat template no admin has approved is proved, and neither called ready nor pointed to.

CREATE FUNCTION template_digest(serving jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT encode(sha256(convert_to(serving ->> 'chat_template', 'UTF8')), 'hex')
$$;

-- The state as it is shown and gone by: what was proved is in state ready, also while it waits for an approval.
CREATE FUNCTION version_state(state text, serving jsonb) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN state = 'ready' AND serving ->> 'chat_template' IS NOT NULL
                    AND NOT EXISTS (SELECT FROM approved_templates WHERE digest = template_digest(serving))
                THEN 'awaiting_approval' ELSE state END
$$;

-- What becomes of the aliases when a version is ready. The first takes `prod`; the alias its upload wanted follows unless
-- it has been moved on purpose or by a newer upload since, or the tenant's pins would not fit: then `wanted_alias` stays.
CREATE FUNCTION version_takes_aliases(made adapter_versions) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM aliases WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, 'prod')) THEN
        PERFORM point_alias(
            made.tenant_id, made.name, 'prod', made.version, NULL, NULL, made.uploaded_by, 'first', NULL, NULL);
    END IF;
    IF made.wanted_alias IS NOT NULL AND NOT EXISTS (
        SELECT FROM alias_history
        WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, made.wanted_alias)
            AND changed_at > made.created_at
            AND (reason NOT IN ('first', 'upload') OR version > made.version))
    THEN
        BEGIN
            PERFORM point_alias(
                made.tenant_id, made.name, made.wanted_alias, made.version, NULL, NULL, made.uploaded_by, 'upload',
                NULL, NULL);
            IF pinned_bytes(made.tenant_id) > (SELECT pin_bytes FROM tenants WHERE id = made.tenant_id) THEN
                RAISE EXCEPTION 'over the pin quota' USING ERRCODE = 'LPX01';
            END IF;
            UPDATE adapter_versions SET wanted_alias = NULL
                WHERE (tenant_id, name, version) = (made.tenant_id, made.name, made.version);
        EXCEPTION WHEN SQLSTATE 'LPX01' THEN
            NULL;
        END;
    END IF;
END $$;

-- The one way a version is proved. False if it is not proving.
CREATE OR REPLACE FUNCTION version_ready(of_tenant text, of_name text, of_version integer)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    made adapter_versions%ROWTYPE;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    -- A statement's own bump is not seen by itself, hence + 1; nobody sees the state between.
    UPDATE adapter_versions SET state = 'ready', ready_generation = (SELECT generation + 1 FROM catalog_generation)
        WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version) AND state = 'proving'
        RETURNING * INTO made;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM version_proving WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version);
    IF version_state(made.state, made.serving) = 'ready' THEN
        PERFORM version_takes_aliases(made);
    END IF;
    RETURN true;
END $$;

-- Lets the template of this digest run. Versions that waited for it, of whatever tenant, are ready in the order they came.
CREATE FUNCTION approve_template(of_digest text, by_key text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    waited adapter_versions%ROWTYPE;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    INSERT INTO approved_templates (digest, approved_by) VALUES (of_digest, by_key) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR waited IN
        SELECT * FROM adapter_versions
        WHERE state = 'ready' AND serving ->> 'chat_template' IS NOT NULL AND template_digest(serving) = of_digest
        ORDER BY tenant_id, name, version
    LOOP
        UPDATE adapter_versions SET ready_generation = (SELECT generation + 1 FROM catalog_generation)
            WHERE (tenant_id, name, version) = (waited.tenant_id, waited.name, waited.version);
        PERFORM version_takes_aliases(waited);
    END LOOP;
END $$;
