-- name: quota_exchange
-- $1: gateway id; $2: number of the exchange; $3: seconds after the exchange until the gateway's leases expire; $4:
-- asks, in the form that the function quota_exchange takes.
SELECT quota_exchange($1, $2, make_interval(secs => $3), $4) AS responses,
       extract(epoch FROM clock_timestamp())::float8 AS database_at;

-- name: quota_release
-- $1: ids of gateways that have ended and whose usage has all been loaded. A gateway that lost its leases holds the new
-- ones under <id>#<number>.
DELETE FROM quota_holders WHERE split_part(gateway_id, '#', 1) = ANY ($1::text[]);

-- name: quota_upkeep
SELECT quota_upkeep();

-- name: quota_find
SELECT {columns of store.records.Quota} FROM quotas WHERE subject = $1;

-- name: quota_put
-- $1: tenant id; $2: id of the key that the limits apply to, or null if they apply to the tenant as a whole.
INSERT INTO quotas (tenant_id, key_id, {columns of store.records.Quota})
VALUES ($1, $2, {values of store.records.Quota})
ON CONFLICT (subject) DO UPDATE
SET {updates of store.records.Quota}, updated_at = now();

-- name: quota_delete
DELETE FROM quotas WHERE subject = $1;

-- name: quotas_lock
-- $1: tenant id. Locks the limits of the tenant and of its keys, in the order in which exchanges lock them.
SELECT FROM quotas WHERE tenant_id = $1 ORDER BY subject FOR UPDATE;

-- name: quota_use
-- $1: subject. Returns, for each limit that gateways divide among themselves, the loaded usage in the current window,
-- the amount that gateways hold, and the end of the window.
SELECT kind, ends_at,
       coalesce((SELECT CASE unit WHEN 'tokens' THEN metered_tokens ELSE cost END FROM usage_totals t
                 WHERE (t.subject, t.span, t.start) = ($1, w.span, (w.start AT TIME ZONE 'UTC')::date)), 0)::numeric AS used,
       coalesce((SELECT sum(granted) FROM quota_leases l
                 WHERE (l.subject, l.kind, l.start) = ($1, w.kind, w.start)), 0)::numeric AS held
FROM (SELECT kind, span, split_part(kind, '_', 1) AS unit,
             coalesce(date_trunc(span, now(), 'UTC'), '-infinity') AS start,
             (date_trunc(span, now() AT TIME ZONE 'UTC') + ('1 ' || span)::interval) AT TIME ZONE 'UTC' AS ends_at
      FROM (VALUES
          ('requests_per_minute', 'minute'), ('tokens_per_minute', 'minute'), ('concurrent_requests', NULL),
          ('tokens_per_day', 'day'), ('tokens_per_month', 'month'), ('spend_per_day', 'day'), ('spend_per_month', 'month')
      ) AS k (kind, span)) w;

-- name: adapters_held
-- $1: tenant id; $2: adapter name; $3: digest of a content. Returns the number of adapters and the bytes of contents
-- that the tenant has, and whether it already has this name and this content.
SELECT adapters, bytes,
       EXISTS (SELECT FROM adapter_versions
               WHERE tenant_id = $1 AND name = $2 AND state NOT IN ('rejected', 'retired')) AS has_name,
       EXISTS (SELECT FROM adapter_versions
               WHERE digest = $3 AND tenant_id = $1 AND state NOT IN ('rejected', 'retired')) AS has_content
FROM holdings_of($1);

-- name: holdings_store
SELECT store_holdings($1);

-- name: quota_set_pin_bytes
UPDATE tenants SET pin_bytes = $2 WHERE id = $1 AND pin_bytes <> $2;
