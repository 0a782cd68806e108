-- Each version has a proof of its own, and a refused upload takes no version number.

-- What a worker computed for this version, and when. `adapter_proofs` stays what gateways load: which image of a content
-- a worker of a layout may serve. It is not shown to tenants: it would tell one of another's upload of the same bytes.
CREATE TABLE version_proofs (
    tenant_id   text NOT NULL,
    name        text NOT NULL,
    version     integer NOT NULL,
    base_digest content_digest NOT NULL,
    layout      text NOT NULL,
    checksum    content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker      text NOT NULL,
    proved_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name, version, base_digest, layout),
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions ON DELETE CASCADE
);

-- A proof older than a version was another's. Gateways have such versions proved again beside their other work.
INSERT INTO version_proofs (tenant_id, name, version, base_digest, layout, checksum, fingerprint, worker, proved_at)
SELECT v.tenant_id, v.name, v.version, p.base_digest, p.layout, p.checksum, p.fingerprint, p.worker, p.proved_at
FROM adapter_versions v JOIN adapter_proofs p USING (digest)
WHERE v.state IN ('ready', 'retired') AND p.proved_at >= v.created_at;

-- Makes this version ready, and no other of the same content. False if the version is not proving any more.
CREATE OR REPLACE FUNCTION version_proved(
    of_tenant text, of_name text, of_version integer,
    in_layout text, with_checksum text, with_fingerprint jsonb, by_worker text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    content text;
    base    text;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    SELECT v.digest, b.digest INTO content, base
        FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
        WHERE (v.tenant_id, v.name, v.version) = (of_tenant, of_name, of_version) AND v.state = 'proving';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO adapter_proofs (digest, base_digest, layout, checksum, fingerprint, worker)
        VALUES (content, base, in_layout, with_checksum, with_fingerprint, by_worker)
        ON CONFLICT DO NOTHING;
    INSERT INTO version_proofs (tenant_id, name, version, base_digest, layout, checksum, fingerprint, worker)
        VALUES (of_tenant, of_name, of_version, base, in_layout, with_checksum, with_fingerprint, by_worker)
        ON CONFLICT DO NOTHING;
    RETURN version_ready(of_tenant, of_name, of_version);
END $$;

-- Uploads that were refused before they became a version. Few of each tenant are kept, and not for long.
CREATE TABLE rejected_uploads (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name        entity_name NOT NULL,
    error       jsonb NOT NULL,
    uploaded_by text, -- key id
    rejected_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX rejected_uploads_tenant ON rejected_uploads (tenant_id, id);
CREATE INDEX adapter_versions_rejected ON adapter_versions (tenant_id, created_at) WHERE state = 'rejected';

GRANT SELECT, INSERT, DELETE ON version_proofs, rejected_uploads TO loraplex_app;

DO $$
DECLARE
    guarded text;
BEGIN
    FOREACH guarded IN ARRAY ARRAY['version_proofs', 'rejected_uploads']
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', guarded);
        EXECUTE format(
            'CREATE POLICY tenant ON %I TO loraplex_app USING (
                (SELECT current_setting(''loraplex.tenant'', true)) = ''*''
                OR tenant_id = (SELECT current_setting(''loraplex.tenant'', true)))', guarded);
    END LOOP;
END $$;
