//! All integration tests of `firn-transact`, in one program.

mod apart;
mod apply_later;
mod attach;
mod backup;
mod common;
mod crash;
mod device;
mod faults;
mod full;
mod hidden;
mod history;
mod hosts;
mod inline;
mod joint;
mod names;
mod oracle;
mod planted;
mod sequences;
mod shadow;
mod temporary;
mod together;
mod top;
mod tree;
