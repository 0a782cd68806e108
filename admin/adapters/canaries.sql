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
-- $1: the moves that made canary sets; $2: seconds to look back, for each.
WITH seen AS (
    SELECT o.change, o.version, o.requests, o.errors, o.ttft
    FROM unnest($1::bigint[], $2::integer[]) AS asked (change, window_s) JOIN version_outcomes o USING (change)
    WHERE o.bucket > now() - asked.window_s * interval '1 second'
), totals AS (
    SELECT change, version, sum(requests)::integer AS requests, sum(errors)::integer AS errors
    FROM seen GROUP BY change, version
), steps AS (
    SELECT change, version, step, sum(count)::integer AS count
    FROM seen CROSS JOIN unnest(ttft) WITH ORDINALITY AS t (count, step) GROUP BY change, version, step
), histograms AS (
    SELECT change, version, array_agg(count ORDER BY step) AS ttft FROM steps GROUP BY change, version
)
SELECT change, version, requests, errors, coalesce(ttft, '{}') AS ttft
FROM totals LEFT JOIN histograms USING (change, version);

-- name: outcomes_prune
DELETE FROM version_outcomes WHERE bucket < now() - interval '25 hours';

-- name: canary_roll_back
-- $1-$3: the alias; $4: its stable version; $5: why; $6: the move that made the canary set. Null if it has moved since.
SELECT point_alias($1, $2, $3, $4, NULL, NULL, NULL, 'auto_rollback', $5, $6);
