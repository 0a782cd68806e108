-- name: content_hold
INSERT INTO loose_contents (digest, holder, due) VALUES ($1, $2, now() + interval '45 seconds')
ON CONFLICT (digest, holder) DO UPDATE SET due = excluded.due;

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
WITH proofs AS (DELETE FROM adapter_proofs WHERE digest = $1)
DELETE FROM loose_contents WHERE digest = $1 AND due <= now();

-- name: content_settle
DELETE FROM loose_contents WHERE digest = $1 AND due <= now();
