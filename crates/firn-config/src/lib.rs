//! Every option once: flag, `-o` key, environment, TOML key, help, man page.
//!
//! [`table::TABLE`] describes each option; everything that names one is made from it: the parsers of
//! all sources, `firn config`, the completions, the man pages and docs/CONFIGURATION.md. To add an
//! option, add a row there and a field to [`Options`].
//!
//! Promises
//! * Sources are asked in a fixed order: flags (`-o` among them), `FIRN_*` environment, user file,
//!   system file, defaults. [`Resolved`] says of each value where it came from.
//! * [`Options`] that come out of [`Sources::resolve`] are in range and free of contradictions.
//! * Nothing here reads the environment of the process but [`Surroundings::of_process`] and [`misspelt_variables`].

mod change;
mod complete;
mod environment;
mod error;
mod file;
mod flags;
mod given;
mod kernel;
mod minus_o;
mod options;
mod page;
mod quantity;
mod resolve;
mod suggest;
pub mod table;
mod value;

pub use change::{FIXED_OPTIONS, change_options};
pub use complete::complete_minus_o;
pub use environment::{
    UnknownVariable, VARIABLES, Variable, misspelt_variables, unknown_variables,
};
pub use error::ConfigError;
pub use flags::{arg, args, given_flags};
pub use given::{Given, Origin};
pub use kernel::KernelFlag;
pub use minus_o::{MinusO, Unknown, parse_minus_o};
pub use options::{
    Close, Drain, Flatten, Frontend, Fsync, Layout, LogLevel, Mode, Options, Order, Participants,
    Partner, Passthrough, Placement, RecordPlace, Takeover, TokenService,
};
pub use page::configuration_page;
pub use quantity::{duration_text, parse_duration_ms, parse_size, size_text};
pub use resolve::{Resolved, Sources, Surroundings};
pub use suggest::nearest;
pub use value::{Kind, Value};
