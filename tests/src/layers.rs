//! Layers that may lie below transactions: files in logs, files in lanes, both or neither.
//!
//! With transactions above them (`drain=commit`) or without, they are the eight stacks that `store.rs` of `firn-daemon`
//! builds. [`on_every_layers!`](crate::on_every_layers) makes a test of each.

use std::path::Path;

use crate::differential::{Rules, is_known_to_all};
use crate::lanes::place_in;

/// Layers below transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Files lie in the backing.
    None,
    /// `layout=log`.
    Logs,
    /// `placement=dirs`.
    Lanes,
    /// `layout=log` over `placement=dirs`.
    LogsInLanes,
}

impl Layers {
    /// How many there are.
    pub const COUNT: usize = Self::LogsInLanes as usize + 1;

    /// Whether files are written to logs.
    pub fn has_logs(self) -> bool {
        matches!(self, Self::Logs | Self::LogsInLanes)
    }

    /// Whether files lie in lanes.
    pub fn has_lanes(self) -> bool {
        matches!(self, Self::Lanes | Self::LogsInLanes)
    }

    /// Mount options for these layers, with `lanes` where they have lanes, and `extra`.
    pub fn options(self, lanes: &[impl AsRef<Path>], extra: &str) -> String {
        let options = if self.has_logs() {
            format!("{extra},layout=log")
        } else {
            extra.to_owned()
        };
        if self.has_lanes() {
            place_in(lanes, &options)
        } else {
            options
        }
    }

    /// What of a plain directory's answers these layers give.
    pub fn rules(self) -> Rules {
        Rules {
            is_wanted: match self {
                Self::None => |_| true,
                _ => is_known_to_all,
            },
            canonical: |answer| answer,
        }
    }
}

/// Makes tests `NAME: FUNCTION(LAYERS);`, where LAYERS is the name of a value of [`Layers`]. Does not compile unless each
/// value has its test, in the order of the values.
#[macro_export]
macro_rules! on_every_layers {
    ($($(#[$attribute:meta])* $name:ident: $function:ident($layers:ident);)*) => {
        const _: () = {
            let tested = [$($crate::layers::Layers::$layers),*];
            assert!(tested.len() == $crate::layers::Layers::COUNT, "layers without a test");
            let mut index = 0;
            while index < tested.len() {
                assert!(tested[index] as usize == index, "not the order of the layers");
                index += 1;
            }
        };
        $(
            $(#[$attribute])*
            #[test]
            fn $name() {
                $function($crate::layers::Layers::$layers);
            }
        )*
    };
}
