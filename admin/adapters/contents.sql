-- name: content_hold
-- Null if it is being removed, by a holder whose name begins with '-'.
INSERT INTO loose_contents (digest, holder, due)
SELECT $1::text, $2, now() + interval '45 seconds'
WHERE NOT EXISTS (SELECT FROM loose_contents WHERE digest = $1::text AND starts_with(holder, '-') AND due > now())
RETURNING true;

-- name: content_renew
-- One that ran out is not there any more if the content may have been removed since.
UPDATE loose_contents SET due = now() + interval '45 seconds' WHERE digest = $1 AND holder = $2 RETURNING true;

-- name: content_is_held
SELECT EXISTS (SELECT FROM loose_contents WHERE digest = $1 AND holder = $2);

-- name: content_let_go
-- What is to be removed is due again.
UPDATE loose_contents SET due = now() WHERE digest = $1 AND holder = $2;

-- name: content_release
DELETE FROM loose_contents WHERE digest = $1 AND holder = $2;

-- name: content_leave
INSERT INTO loose_contents (digest, holder, due) VALUES ($1, '', now()) ON CONFLICT DO NOTHING;

-- name: contents_leave_of_tenant
INSERT INTO loose_contents (digest, holder, due)
SELECT DISTINCT digest, '', now() FROM adapter_versions WHERE tenant_id = $1 AND digest IS NOT NULL
ON CONFLICT DO NOTHING;

-- name: contents_due
SELECT digest FROM loose_contents GROUP BY digest HAVING max(due) <= now() ORDER BY digest;

-- name: content_is_free
SELECT content_is_free($1);

-- name: content_forget
-- $2: the process that removed it. Nothing if that took so long that others may have put it there again.
WITH removed AS (DELETE FROM loose_contents WHERE digest = $1 AND holder = $2 RETURNING digest)
DELETE FROM adapter_proofs WHERE digest IN (SELECT digest FROM removed);

-- name: content_settle
DELETE FROM loose_contents WHERE digest = $1 AND due <= now();
