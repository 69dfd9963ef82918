//! The log layout (`layout=log`): files that many hosts write at the same time.
//!
//! If many hosts write to one file in place, their writes seek and wait for each other's locks. With the log layout
//! each host appends its bytes to a log of its own, and describes them in an index of its own. The indexes of all hosts
//! together define the bytes of the file. Later the logs are *flattened*: their bytes are copied into the plain file.
//!
//! Terms
//! * Plain file: the ordinary file of the backing, with the file's name, inode and attributes.
//! * Container: a directory with the logs and indexes of all hosts for one file.
//! * Generation: the number of a container. A file gets the next one when a host writes after the last one was closed.
//! * Frame: an entry of an index. It describes one change of the file.
//! * Table: a part of an index, sorted by offset in the file.
//! * Seal: the decision which bytes of each index count. A sealed container is flattened.
//!
//! | module | contents |
//! |---|---|
//! | [`backing`] | the log layout as a backing over a backing |
//! | `file` | one logged file: its containers and the plain file |
//! | [`container`] | the logs and indexes of all hosts for one generation |
//! | [`run`], [`frame`] | the pieces of a change; the entries of an index |
//! | [`table`], [`block`] | sorted parts of an index |
//! | [`resolve`], [`cut`] | which change gives each byte its value; what cuts hide |
//! | [`seal`], `times` | the end of a container, and the file's modification time meanwhile |
//! | `tag`, `orphans` | what protects a file whose containers are missing; containers whose file is missing |
//! | `verify`, `salvage` | finds damage; gives up what is damaged |

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

pub use backing::{
    CONTAINERS, LogBacking, LoggedTotals, Setup, UnflattenedFiles, WhenClosed, make_dir,
};
pub use container::{ChangeError, ChangeResult, Container, Memory, Walk};
pub use file::FlattenOutcome;
pub use file_dir::container_path;
pub use file_id::is_file_dir;
pub use logs::{Logs, find_object};
pub use orphans::{
    ContainersWithoutFile, Orphans, find_containers_without_file, remove_half_removed_containers,
};
pub use salvage::{Loss, LostPart, Report};
pub use seal::{FlattenProgress, Lifecycle};
pub use verify::{Fault, Finding, Verified, verify};
