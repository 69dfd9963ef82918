//! Transactions, and checkpoints that leave their host.

mod agent;
mod agent_bounds;
mod agent_ofi;
mod agent_security;
mod async_commit;
mod backup;
mod commit_rules;
mod partner;
mod rollback;
mod rule_suites;
mod rule_writers;
mod rules_keep;
mod rules_programs;
mod shadow;
mod transactions;
