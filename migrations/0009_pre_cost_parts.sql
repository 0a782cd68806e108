-- What requests cost by kind of token. Of a row of before, or of a gateway of before, `cost` alone is known: then the
-- three are 0, and in sums of both what they lack of `cost` is what was not told apart.

ALTER TABLE usage
    ADD COLUMN input_cost        bigint NOT NULL DEFAULT 0, -- pico-dollars, as cost; of prompt tokens that were computed
    ADD COLUMN cached_input_cost bigint NOT NULL DEFAULT 0,
    ADD COLUMN output_cost       bigint NOT NULL DEFAULT 0;
ALTER TABLE usage_hourly
    ADD COLUMN input_cost        numeric NOT NULL DEFAULT 0,
    ADD COLUMN cached_input_cost numeric NOT NULL DEFAULT 0,
    ADD COLUMN output_cost       numeric NOT NULL DEFAULT 0;
