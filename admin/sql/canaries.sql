-- name: outcomes_add
-- $1: gateway id; $2: [{change, version, requests, errors, ttft}]. Of canary sets that are still as they were made. A
-- bucket is a thirtieth of the window that is judged, by default 300 s, but not less than 10 s: all of them are read every
-- 2 s by each gateway.
INSERT INTO version_outcomes AS v (change, version, bucket, gateway_id, requests, errors, ttft)
SELECT o.change, o.version,
       date_bin(make_interval(secs => greatest(10, coalesce((a.policy ->> 'window_s')::integer, 300) / 30)), now(), 'epoch'),
       $1, o.requests, o.errors, o.ttft
FROM jsonb_to_recordset($2)
    AS o (change bigint, version integer, requests integer, errors integer, ttft integer[])
JOIN alias_history h ON h.id = o.change
JOIN aliases a ON (a.tenant_id, a.name, a.alias, a.change) = (h.tenant_id, h.name, h.alias, h.id)
ON CONFLICT (change, version, bucket, gateway_id) DO UPDATE
SET requests = v.requests + excluded.requests,
    errors = v.errors + excluded.errors,
    ttft = ARRAY(SELECT coalesce(had, 0) + coalesce(came, 0)
                 FROM unnest(v.ttft, excluded.ttft) WITH ORDINALITY AS t (had, came, step) ORDER BY step);

-- name: outcomes_of
-- $1: the move that made the canary set; $2: seconds to look back.
WITH seen AS (
    SELECT version, requests, errors, ttft FROM version_outcomes
    WHERE change = $1 AND bucket > now() - $2 * interval '1 second'
)
SELECT version, sum(requests)::integer AS requests, sum(errors)::integer AS errors,
       ARRAY(SELECT sum(count)::integer
             FROM seen s CROSS JOIN unnest(s.ttft) WITH ORDINALITY AS t (count, step)
             WHERE s.version = seen.version GROUP BY step ORDER BY step) AS ttft
FROM seen GROUP BY version;

-- name: outcomes_prune
DELETE FROM version_outcomes WHERE bucket < now() - interval '25 hours';

-- name: canary_roll_back
-- $1-$3: the alias; $4: its stable version; $5: why; $6: the move that made the canary set. Null if it has moved since.
SELECT point_alias($1, $2, $3, $4, NULL, NULL, NULL, 'auto_rollback', $5, $6);
