-- name: audit_actor
-- Sets the origin of this transaction's changes for the audit log. $1: key id; $2: request id; $3: the client's
-- address, or null.
SELECT set_config('loraplex.key_id', $1, true), set_config('loraplex.request_id', $2, true),
       set_config('loraplex.address', coalesce($3, ''), true);

-- name: audit_list
-- $1: tenant id; $2: object; $3: seq before which the page begins. Each may be null. $4: limit.
SELECT {columns of admin.audit.audit.AuditView}, encode(hash, 'hex') AS hash FROM audit_log
WHERE ($1::text IS NULL OR tenant_id = $1) AND ($2::text IS NULL OR object = $2) AND ($3::bigint IS NULL OR seq < $3)
ORDER BY seq DESC LIMIT $4;

-- name: audit_export
-- $1: tenant id, or null; $2: seq after which the page begins; $3: limit.
SELECT {columns of admin.audit.audit.AuditView}, encode(hash, 'hex') AS hash FROM audit_log
WHERE ($1::text IS NULL OR tenant_id = $1) AND seq > $2 ORDER BY seq LIMIT $3;

-- name: audit_newest
SELECT coalesce(max(seq), 0) FROM audit_log;

-- name: audit_hash
SELECT hash FROM audit_log WHERE seq = $1;

-- name: audit_part
SELECT {columns of admin.audit.audit.AuditView}, prev, details::text AS details FROM audit_log
WHERE seq > $1 ORDER BY seq LIMIT $2;

-- name: audit_checkpoint
SELECT object, details ->> 'hash' AS hash, details ->> 'seal' AS seal FROM audit_log
WHERE action = 'audit.prune' ORDER BY seq DESC LIMIT 1;

-- name: audit_oldest
-- $1: time; $2: limit. Considers the $2 oldest rows. Returns the number of rows from before $1, and the seq and time of
-- the first one, or nulls if there is none.
SELECT min(seq) AS seq, min(at) AS at, count(*) AS num
FROM (SELECT seq, at FROM audit_log ORDER BY seq LIMIT $2) oldest WHERE at < $1;

-- name: audit_prune
-- $1: seq of the last row to delete; $2: the row's hash; $3: the seal of both.
SELECT audit_prune($1, $2, $3);
