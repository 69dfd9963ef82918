//! What workers tell the launcher: one line of text a message.

use std::time::Duration;

use crate::checkpoint::Saved;

/// A message of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// First of all: which rank this is.
    Hello(u32),
    /// A step is done (only rank 0 says so).
    At(u64),
    /// The rank's file of a checkpoint is written and closed; the worker waits for a `go` line.
    Saved(u64, Saved),
    /// Hash of one plane of the final state.
    Plane(usize, u64),
    /// Nothing more comes.
    Done,
}

impl Message {
    /// The line, with its end.
    pub fn line(&self) -> String {
        match self {
            Message::Hello(rank) => format!("hello {rank}\n"),
            Message::At(step) => format!("at {step}\n"),
            Message::Saved(step, saved) => format!(
                "saved {step} {} {} {} {}\n",
                saved.bytes,
                saved.crc,
                saved.writes,
                saved.in_calls.as_nanos()
            ),
            Message::Plane(plane, hash) => format!("plane {plane} {hash}\n"),
            Message::Done => "done\n".into(),
        }
    }

    /// The message of a line; `None` if it is none.
    pub fn parse(line: &str) -> Option<Message> {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let numbers: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        match (name, &numbers[..]) {
            ("hello", &[rank]) => Some(Message::Hello(rank.try_into().ok()?)),
            ("at", &[step]) => Some(Message::At(step)),
            ("saved", &[step, bytes, crc, writes, nanos]) => {
                let crc = crc.try_into().ok()?;
                Some(Message::Saved(
                    step,
                    Saved {
                        bytes,
                        crc,
                        writes,
                        in_calls: Duration::from_nanos(nanos),
                    },
                ))
            }
            ("plane", &[plane, hash]) => Some(Message::Plane(plane as usize, hash)),
            ("done", []) => Some(Message::Done),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_survives_its_line() {
        let saved = Saved {
            bytes: 9,
            crc: u32::MAX,
            writes: 3,
            in_calls: Duration::from_nanos(17),
        };
        for message in [
            Message::Hello(3),
            Message::At(40),
            Message::Saved(80, saved),
            Message::Plane(5, u64::MAX),
            Message::Done,
        ] {
            assert_eq!(Message::parse(&message.line()), Some(message));
        }
        assert_eq!(Message::parse("saved 1 2"), None);
    }
}
