-- name: content_hold
-- $1: digest; $2: id of the holder. Returns null if the content is being removed, by a holder whose id begins with '-'.
INSERT INTO loose_contents (digest, holder, due)
SELECT $1::text, $2, now() + interval '45 seconds'
WHERE NOT EXISTS (SELECT FROM loose_contents WHERE digest = $1::text AND starts_with(holder, '-') AND due > now())
RETURNING true;

-- name: content_renew
-- Returns null if the hold has expired and was deleted, so that the content may have been removed.
UPDATE loose_contents SET due = now() + interval '45 seconds' WHERE digest = $1 AND holder = $2 RETURNING true;

-- name: content_is_held
SELECT EXISTS (SELECT FROM loose_contents WHERE digest = $1 AND holder = $2);

-- name: content_let_go
-- Makes a content due for removal again after its removal has failed. $2: id of the holder that tried to remove it.
UPDATE loose_contents SET due = now() WHERE digest = $1 AND holder = $2;

-- name: content_release
DELETE FROM loose_contents WHERE digest = $1 AND holder = $2;

-- name: content_leave
INSERT INTO loose_contents (digest, holder, due) VALUES ($1, '', now()) ON CONFLICT DO NOTHING;

-- name: contents_due
SELECT digest FROM loose_contents GROUP BY digest HAVING max(due) <= now() ORDER BY digest;

-- name: content_is_free
SELECT content_is_free($1);

-- name: content_forget
-- $1: digest of a removed content; $2: id of the holder that removed it. Deletes no proofs if this hold no longer
-- exists, because it then expired during the removal, and another process may have stored the content again.
WITH removed AS (DELETE FROM loose_contents WHERE digest = $1 AND holder = $2 RETURNING digest)
DELETE FROM adapter_proofs WHERE digest IN (SELECT digest FROM removed);

-- name: content_settle
DELETE FROM loose_contents WHERE digest = $1 AND due <= now();
