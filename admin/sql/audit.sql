-- name: audit_actor
-- $1: key id; $2: request id; until the transaction ends.
SELECT set_config('loraplex.key_id', $1, true), set_config('loraplex.request_id', $2, true);

-- name: audit_list
-- $1: tenant id; $2: object; $3: seq to stay below; each may be null.
SELECT seq, at, key_id, tenant_id, action, object, details, request_id, prev, hash FROM audit_log
WHERE ($1::text IS NULL OR tenant_id = $1) AND ($2::text IS NULL OR object = $2) AND ($3::bigint IS NULL OR seq < $3)
ORDER BY seq DESC LIMIT $4;

-- name: audit_newest
SELECT coalesce(max(seq), 0) FROM audit_log;

-- name: audit_hash
SELECT hash FROM audit_log WHERE seq = $1;

-- name: audit_part
SELECT seq, at, key_id, tenant_id, action, object, details::text, request_id, prev, hash FROM audit_log
WHERE seq > $1 ORDER BY seq LIMIT $2;
