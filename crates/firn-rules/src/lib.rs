//! Commit rules: which changes of a program that knows nothing of Firn are one checkpoint, and when it is complete.
//!
//! A rule names a scope, the event that makes it complete, and what must hold before it is committed
//! ([`parse_rules`]; [`BUILT_IN`] has those for known programs). [`Machine`] watches what programs do and says when a
//! transaction begins, commits or is aborted. It knows no file system: firnd drives it with the operations of a mount,
//! `firn rules test` with a recorded list of them ([`trace`]).

mod built_in;
pub mod joint;
mod language;
mod machine;
mod pattern;
mod rule_set;
#[cfg(test)]
mod tests;
pub mod trace;

pub use built_in::BUILT_IN;
pub use language::{RULES_BYTES_MAX, RULES_MAX, Rule, RuleError, parent_of, parse_rules};
pub use machine::{
    Action, Ending, Entered, Machine, NOT_OPEN, Operation, Refusal, ScopeNumber, ScopeState, Writer,
};
pub use rule_set::{CheckpointOfPath, LocatedPath, RuleSet, RuleSetError, load_rules};
