//! Commit rules define which changes of a program form one checkpoint, and when that checkpoint is complete. The
//! program itself need not know Firn.
//!
//! A *rule* names a *scope* (the files of one checkpoint), the *event* that completes it, and the conditions for its
//! commit ([`parse_rules`]). [`BUILT_IN`] has rules for known programs. [`Machine`] receives the operations of programs
//! and returns when a transaction begins, commits or aborts. The machine knows no file system. firnd, the process that
//! serves a mount, drives it with the operations of the mount. `firn rules test` drives it with a recorded list of
//! operations ([`trace`]).

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
    Action, Ending, EnteredOperation, Machine, NOT_OPEN, Operation, Refusal, ScopeNumber,
    ScopeState, Writer,
};
pub use rule_set::{CheckpointOfPath, LocatedPath, RuleSet, RuleSetError, load_rules};
