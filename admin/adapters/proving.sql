-- name: proving_claim
-- $1: gateway id; $2: digests of the base models that the gateway's workers serve; $3: maximum number of versions to
-- claim. Tenants take turns: the versions of each tenant are numbered, first the claimed ones and then the others by
-- age, and the lowest numbers are claimed first. Versions that a dead gateway has claimed can be claimed at once.
WITH numbered AS (
    SELECT v.tenant_id, v.name, v.version, v.created_at, v.digest, v.base_name, b.digest AS base_digest,
           row_number() OVER (PARTITION BY v.tenant_id ORDER BY (p.claimed_until < now()) IS NOT FALSE,
                              v.created_at, v.name, v.version) AS number
    FROM version_proving p
    JOIN adapter_versions v USING (tenant_id, name, version)
    JOIN base_models b ON b.name = v.base_name
    WHERE v.state = 'proving' AND b.digest = ANY ($2::text[])
), due AS (
    SELECT p.tenant_id, p.name, p.version, n.digest, n.base_name, n.base_digest
    FROM version_proving p JOIN numbered n USING (tenant_id, name, version)
    WHERE p.claimed_until IS NULL OR p.claimed_until < now() OR p.claimed_by <> $1 AND NOT EXISTS (
        SELECT FROM gateways g WHERE g.id = p.claimed_by AND g.seen_at > now() - interval '5 seconds')
    ORDER BY n.number, n.created_at, n.tenant_id, n.name, n.version
    LIMIT $3 FOR UPDATE OF p SKIP LOCKED
)
UPDATE version_proving p
SET claimed_by = $1, claimed_until = now() + interval '60 seconds', attempts = p.attempts + 1
FROM due WHERE (p.tenant_id, p.name, p.version) = (due.tenant_id, due.name, due.version)
RETURNING p.tenant_id, p.name, p.version, due.digest, due.base_name, due.base_digest, p.attempts;

-- name: proving_renew
-- $1-$3: the version; $4: gateway id. Returns null if the gateway has lost its claim.
UPDATE version_proving SET claimed_until = now() + interval '60 seconds'
WHERE (tenant_id, name, version) = ($1, $2, $3) AND claimed_by = $4 RETURNING true;

-- name: proving_release
-- $1-$3: the version; $4: gateway id; $5: reason for which the version could not be verified now. The version can be
-- claimed again after 2 to 10 seconds.
UPDATE version_proving
SET claimed_by = NULL, detail = $5,
    claimed_until = now() + least(10, 2 ^ least(attempts, 4)) * interval '1 second'
WHERE (tenant_id, name, version) = ($1, $2, $3) AND claimed_by = $4;

-- name: proving_ready
-- $1-$3: the version; $4: layout; $5: checksum; $6: fingerprint; $7: worker id. Returns false if the version
-- is no longer proving, for example because it was retired.
SELECT version_proved($1, $2, $3, $4, $5, $6, $7);

-- name: proving_rejected
-- $1-$3: the version; $4: {code, field, got, allowed, hint}. Returns false if the version is no longer proving, for
-- example because it was retired.
SELECT version_rejected($1, $2, $3, $4);

-- name: proofs_missing
-- $1: layout; $2: digest of a base model; $3: versions to omit, in the form TENANT_ID/NAME/VERSION; $4: limit. Returns
-- ready versions of the base model that have no proof for this layout.
SELECT v.tenant_id, v.name, v.version, v.digest, b.digest AS base_digest
FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
WHERE v.state = 'ready' AND v.expires_at IS NULL AND b.digest = $2 AND NOT v.tenant_id || '/' || v.name || '/' || v.version = ANY ($3::text[])
    AND NOT EXISTS (SELECT FROM version_proofs p
                    WHERE (p.tenant_id, p.name, p.version, p.base_digest, p.layout)
                        = (v.tenant_id, v.name, v.version, $2, $1))
ORDER BY v.tenant_id, v.name, v.version LIMIT $4;

-- name: proof_insert
-- $1-$3: the version; $4: digest of the base model; $5: layout; $6: checksum; $7: fingerprint; $8: worker id. Inserts
-- nothing unless the version is ready.
WITH proved AS (
    SELECT tenant_id, name, version, digest FROM adapter_versions
    WHERE (tenant_id, name, version) = ($1, $2, $3) AND state = 'ready'
), image AS (
    INSERT INTO adapter_proofs (digest, base_digest, layout, checksum, fingerprint, worker)
    SELECT digest, $4, $5, $6, $7, $8 FROM proved ON CONFLICT DO NOTHING
)
INSERT INTO version_proofs (tenant_id, name, version, base_digest, layout, checksum, fingerprint, worker)
SELECT tenant_id, name, version, $4, $5, $6, $7, $8 FROM proved ON CONFLICT DO NOTHING;

-- name: proving_unserved
-- $1: digests of the base models that workers serve. Sets the detail of waiting versions of all other base models.
UPDATE version_proving p SET detail = 'no worker serves ' || v.base_name
FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
WHERE (v.tenant_id, v.name, v.version) = (p.tenant_id, p.name, p.version)
    AND v.state = 'proving' AND NOT b.digest = ANY ($1::text[])
    AND (p.claimed_until IS NULL OR p.claimed_until < now())
    AND p.detail IS DISTINCT FROM 'no worker serves ' || v.base_name;
