//! Reads and writes Firn's own files, below `.firn/` in the tree of a mount or in a backup ([`firn_hosts::own`]).

pub(crate) use firn_hosts::own::{
    OwnError, clear, clear_but, find, find_dir, is_path, list, make_dir, must_find_dir, new_name,
    own_caller, read_file, replace_file, replace_file_unsynced, write_all, write_new_file,
};
