-- Why gateways do not reach a worker, as one that tried last says.

ALTER TABLE workers
    ADD COLUMN failure text NOT NULL DEFAULT '';
