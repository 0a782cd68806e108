-- name: version_next
UPDATE adapters SET last_version = last_version + 1 WHERE tenant_id = $1 AND name = $2
RETURNING last_version;

-- name: version_insert
-- $1: version number; $2: digest of the content; $3: id of the key that signed the content, or null.
INSERT INTO adapter_versions (version, state, digest, signed_by, {columns of admin.adapters.versions.NewVersion})
VALUES ($1, 'proving', $2, $3, {values of admin.adapters.versions.NewVersion});

-- name: version_prove
INSERT INTO version_proving (tenant_id, name, version, detail)
VALUES ($1, $2, $3, 'waiting for a worker that serves ' || $4::text);

-- name: version_want_alias
UPDATE adapter_versions SET wanted_alias = $4, uploaded_by = $5
WHERE tenant_id = $1 AND name = $2 AND version = $3;

-- name: version_find_content
SELECT version, version_state(state, serving) AS state FROM adapter_versions
WHERE tenant_id = $1 AND name = $2 AND base_name = $3 AND digest = $4 AND serving = $5
    AND state IN ('proving', 'ready') AND expires_at IS NULL;

-- name: version_list
-- $3: number of the previous page's last version; $4: limit, or null; $5: number of the only version to return, or
-- null; $6: maximum age of a worker's report in seconds. `faults` omits faults from before the version was created,
-- because they would reveal that another tenant has uploaded the same content. `tiers` is empty if the connection may
-- not see workers.
WITH heard (digest, worker, tier) AS MATERIALIZED (
    SELECT h.digest, w.id, h.tier FROM workers w, jsonb_to_recordset(w.status -> 'adapters') AS h (digest text, tier text)
    WHERE h.tier <> '' AND w.reported_at > now() - make_interval(secs => $6)
        AND h.digest IN (SELECT digest FROM adapter_versions WHERE (tenant_id, name) = ($1, $2))
)
SELECT {v.columns of admin.adapters.schemas.VersionView}, version_state(v.state, v.serving) AS state, v.base_name AS model,
       version_state(v.state, v.serving) = 'ready' AND NOT EXISTS (
           SELECT FROM gateways g
           WHERE g.generation < v.ready_generation AND g.seen_at > now() - interval '10 seconds') AS served,
       (v.manifest -> 'max_rank')::integer AS max_rank, (v.manifest -> 'num_parameters')::bigint AS num_parameters,
       (v.manifest -> 'file_bytes')::bigint AS file_bytes, coalesce(v.manifest -> 'warnings', '[]') AS warnings,
       ARRAY (SELECT a.alias FROM aliases a
              WHERE (a.tenant_id, a.name) = (v.tenant_id, v.name) AND (a.version = v.version OR EXISTS (
                  SELECT FROM canary_targets t
                  WHERE (t.tenant_id, t.name, t.alias, t.version) = (a.tenant_id, a.name, a.alias, v.version)))
              ORDER BY a.alias) AS aliases,
       (SELECT revoked_at FROM signing_keys k
        WHERE (k.tenant_id, k.id) = (v.tenant_id, v.signed_by)) AS signing_key_revoked_at,
       CASE WHEN v.expires_at IS NOT NULL THEN 'skipped' WHEN proved.found IS NOT NULL THEN 'passed'
            WHEN v.state = 'rejected' THEN 'failed' ELSE 'pending' END AS effect_proof,
       v.serving - 'chat_template' || jsonb_build_object(
           'template', CASE WHEN v.serving ->> 'chat_template' IS NOT NULL THEN jsonb_build_object(
               'digest', template_digest(v.serving), 'text', v.serving ->> 'chat_template',
               'approved', EXISTS (SELECT FROM approved_templates WHERE digest = template_digest(v.serving))) END) AS serving,
       CASE WHEN v.state = 'proving'
            THEN jsonb_build_object('detail', p.detail, 'attempts', coalesce(p.attempts, 0)) END AS proving,
       coalesce(proved.found, '[]') AS proofs,
       (SELECT coalesce(jsonb_agg(f ORDER BY f.worker), '[]') FROM (
           SELECT {columns of admin.adapters.schemas.FaultView} FROM adapter_faults
           WHERE digest = v.digest AND since >= v.created_at) f) AS faults,
       (SELECT coalesce(jsonb_agg(h ORDER BY h.worker), '[]') FROM (
           SELECT {columns of admin.adapters.adapters.TierView} FROM heard WHERE digest = v.digest) h) AS tiers,
       NULL AS stored, 'adapter.version' AS object
FROM adapter_versions v LEFT JOIN version_proving p USING (tenant_id, name, version)
CROSS JOIN LATERAL (
    SELECT jsonb_agg(f ORDER BY f.layout) AS found FROM (
        SELECT {columns of admin.adapters.schemas.ProofView} FROM version_proofs
        WHERE (tenant_id, name, version, base_digest) = (v.tenant_id, v.name, v.version, v.manifest ->> 'base_digest')) f
) proved
WHERE v.tenant_id = $1 AND v.name = $2 AND v.version > $3 AND ($5::integer IS NULL OR v.version = $5)
ORDER BY v.version LIMIT $4;

-- name: version_states
SELECT version, version_state(state, serving) AS state, expires_at IS NOT NULL AS is_ephemeral,
       (SELECT name FROM tenants WHERE id = $1) AS owner,
       signature IS NULL AND (SELECT require_signature FROM tenants WHERE id = $1) AS lacks_signature
FROM adapter_versions WHERE tenant_id = $1 AND name = $2 AND version = ANY ($3::integer[]);

-- name: rejected_upload_add
-- $5: number of refused uploads to keep for each tenant, including this one.
WITH gone AS (
    DELETE FROM rejected_uploads WHERE tenant_id = $1 AND id NOT IN (
        SELECT id FROM rejected_uploads WHERE tenant_id = $1 ORDER BY id DESC LIMIT $5::integer - 1)
)
INSERT INTO rejected_uploads (tenant_id, name, error, uploaded_by) VALUES ($1, $2, $3, $4);

-- name: rejected_upload_list
SELECT {columns of admin.adapters.versions.RejectedUpload} FROM rejected_uploads WHERE tenant_id = $1 ORDER BY id DESC;

-- name: rejected_uploads_prune
-- $1: days for which refused uploads are kept.
DELETE FROM rejected_uploads WHERE rejected_at < now() - make_interval(days => $1);

-- name: rejected_versions_to_prune
-- $1: days for which rejected versions are kept; $2: number of rejected versions to keep for each tenant.
SELECT tenant_id, name, version FROM (
    SELECT tenant_id, name, version, created_at,
           row_number() OVER (PARTITION BY tenant_id ORDER BY created_at DESC, name, version DESC) AS place
    FROM adapter_versions WHERE state = 'rejected'
) r
WHERE place > $2 OR created_at < now() - make_interval(days => $1);

-- name: template_approve
SELECT approve_template($1, $2);
