//! The log layout (`layout=log`): a file that many hosts write.
//!
//! In-place writes of many hosts to one file seek and wait for each other's locks. Here each host appends its bytes to
//! a log of its own, and to an index that says what they are. The file's bytes are whatever the indexes of all hosts
//! give, until the logs are flattened into the plain file.
//!
//! | module | what |
//! |---|---|
//! | [`run`] | the pattern in a writer's pieces |
//! | [`frame`] | the bytes of an index |
//! | [`cut`] | where what a host wrote ends |
//! | [`resolve`] | where each byte of a file is, by what all hosts say |
//! | [`container`] | the logs of all hosts for one file |
//! | [`backing`] | a backing over a backing, with files in containers |
//! | [`seal`] | the end of a container, and its way into the plain file |
//! | `tag` | what a plain file says of its container |
//! | `salvage` | the way out of a container that is damaged for good |

mod append;
pub mod backing;
pub mod block;
pub mod container;
pub mod cut;
mod file;
mod file_dir;
mod file_id;
pub mod frame;
pub mod head;
mod index_reader;
mod lag;
mod locate;
mod logs;
pub mod names;
mod orphans;
pub mod resolve;
pub mod run;
mod salvage;
pub mod seal;
mod sort;
pub mod table;
mod tag;
mod times;
mod turn;
mod verify;
mod writer;

pub use backing::{CONTAINERS, Left, LogBacking, Logged, Setup, WhenClosed, make_dir};
pub use container::{ChangeError, Changed, Container, Memory, Walk};
pub use file::Flattened;
pub use file_dir::container_path;
pub use file_id::is_file_dir;
pub use logs::{Logs, find_object};
pub use orphans::{Orphans, Unowned, find_unowned, remove_retired};
pub use salvage::{Loss, LostPart, Report};
pub use seal::{Ending, Flat};
pub use verify::{Fault, Finding, Verified, verify};
