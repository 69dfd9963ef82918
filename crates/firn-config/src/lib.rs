//! Options of a mount: one description of each, and everything that is made from it.
//!
//! [`table::TABLE`] describes each option. From it come the parsers of all sources, `firn config`, the completions, the
//! man pages and docs/CONFIGURATION.md. To add an option, add a row to the table and a field to [`Options`].
//!
//! A *source* gives options. Sources in the order of precedence: flags and `-o`, `FIRN_*` environment, user file,
//! system file, default.
//!
//! Promises
//! * [`Resolved`] holds the value of the first source that gives the option, and says which source that was.
//! * [`Options`] that [`Sources::resolve`] returns are in range and do not contradict each other.
//! * Only [`ProcessSources::of_process`] and [`misspelt_variables`] read the environment of the process.

mod change;
mod complete;
mod environment;
mod error;
mod file;
mod flags;
mod kernel;
mod minus_o;
mod options;
mod page;
mod quantity;
mod resolve;
mod suggest;
pub mod table;
mod unchecked_option;
mod value;

pub use change::{FIXED_OPTIONS, change_options};
pub use complete::complete_minus_o;
pub use environment::{
    UnknownVariable, VARIABLES, Variable, misspelt_variables, unknown_variables,
};
pub use error::ConfigError;
pub use flags::{arg, args, given_flags};
pub use kernel::KernelFlag;
pub use minus_o::{MinusO, Unknown, parse_minus_o};
pub use options::{
    Close, Drain, Flatten, Frontend, Fsync, Layout, LogLevel, Mode, Options, Order, Participants,
    Partner, Passthrough, Placement, RecordPlace, Takeover, TokenService,
};
pub use page::configuration_page;
pub use quantity::{duration_text, parse_duration_ms, parse_size, size_text};
pub use resolve::{ProcessSources, Resolved, Sources};
pub use suggest::nearest;
pub use unchecked_option::{Origin, UncheckedOption};
pub use value::{Kind, Value};
