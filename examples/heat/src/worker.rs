//! One rank: computes its slab, trades boundary planes with two neighbours, writes checkpoints.
//!
//! Standard input is the socket to the neighbour below, standard output the one to the neighbour
//! above (so nothing may print there); the launcher listens on an abstract socket. A neighbour or
//! launcher that dies shows as end of file, and the worker ends: no orphan computes on.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use crate::checkpoint::{self, Stamp};
use crate::control::Message;
use crate::field::Slab;
use crate::options::{Options, Place};

/// Runs this rank to the end.
pub fn run(options: &Options, place: &Place) -> Result<(), String> {
    let outcome = compute(options, place);
    outcome.map_err(|what| format!("rank {}: {what}", place.rank))
}

fn compute(options: &Options, place: &Place) -> Result<(), String> {
    let mut launcher = Launcher::connect(place)?;
    let mut neighbours = Neighbours::inherited(place.rank, options.ranks)?;
    let mut slab = Slab::new(place.rank, options.ranks, options.size);
    let mut stamp = Stamp {
        rank: place.rank,
        ranks: options.ranks,
        step: 0,
    };
    if let Some(step) = place.from_step {
        stamp.step = step;
        checkpoint::load(&options.dir, stamp, &mut slab)?;
    }
    while stamp.step < options.steps {
        neighbours.exchange(&mut slab)?;
        slab.step();
        stamp.step += 1;
        if place.rank == 0 {
            launcher.tell(Message::At(stamp.step))?;
        }
        if stamp.step.is_multiple_of(options.every) {
            let saved = checkpoint::save(&options.dir, stamp, &slab, options.fsync)?;
            launcher.tell(Message::Saved(stamp.step, saved))?;
            launcher.wait_for_go()?;
        }
    }
    for plane in 0..slab.planes {
        launcher.tell(Message::Plane(slab.first + plane, slab.plane_hash(plane)))?;
    }
    launcher.tell(Message::Done)
}

/// The connection to the launcher.
struct Launcher {
    stream: BufReader<UnixStream>,
}

impl Launcher {
    fn connect(place: &Place) -> Result<Launcher, String> {
        let stream = SocketAddr::from_abstract_name(&place.socket)
            .and_then(|address| UnixStream::connect_addr(&address))
            .map_err(|error| format!("cannot reach the launcher: {error}"))?;
        let mut launcher = Launcher {
            stream: BufReader::new(stream),
        };
        launcher.tell(Message::Hello(place.rank))?;
        Ok(launcher)
    }

    fn tell(&mut self, message: Message) -> Result<(), String> {
        let line = message.line();
        self.stream
            .get_mut()
            .write_all(line.as_bytes())
            .map_err(|error| format!("the launcher is gone: {error}"))
    }

    fn wait_for_go(&mut self) -> Result<(), String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(_) if line == "go\n" => Ok(()),
            _ => Err("the launcher is gone".into()),
        }
    }
}

/// The ranks below and above, `None` with a single rank.
struct Neighbours {
    pair: Option<(UnixStream, UnixStream)>,
    /// Even ranks send up first: so a ring of full socket buffers cannot stand still.
    even: bool,
}

impl Neighbours {
    fn inherited(rank: u32, ranks: u32) -> Result<Neighbours, String> {
        let stream = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned()
                .map(UnixStream::from)
                .map_err(|error| format!("no neighbour: {error}"))
        };
        let pair = match ranks {
            1 => None,
            _ => Some((
                stream(std::io::stdin().as_fd())?,
                stream(std::io::stdout().as_fd())?,
            )),
        };
        Ok(Neighbours {
            pair,
            even: rank.is_multiple_of(2),
        })
    }

    fn exchange(&mut self, slab: &mut Slab) -> Result<(), String> {
        let first = slab.plane(0);
        let last = slab.plane(slab.planes - 1);
        let below = 0..first.start;
        let above = last.end..last.end + slab.plane_cells();
        let Some((down, up)) = &mut self.pair else {
            for field in [&mut slab.heat, &mut slab.fuel] {
                field.copy_within(last.clone(), below.start);
                field.copy_within(first.clone(), above.start);
            }
            return Ok(());
        };
        for field in [&mut slab.heat, &mut slab.fuel] {
            if self.even {
                send(up, &field[last.clone()])?;
                receive(down, &mut field[below.clone()])?;
                send(down, &field[first.clone()])?;
                receive(up, &mut field[above.clone()])?;
            } else {
                receive(down, &mut field[below.clone()])?;
                send(up, &field[last.clone()])?;
                receive(up, &mut field[above.clone()])?;
                send(down, &field[first.clone()])?;
            }
        }
        Ok(())
    }
}

fn send(stream: &mut UnixStream, cells: &[f64]) -> Result<(), String> {
    let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    stream
        .write_all(&bytes)
        .map_err(|error| format!("a neighbour is gone: {error}"))
}

fn receive(stream: &mut UnixStream, cells: &mut [f64]) -> Result<(), String> {
    let mut bytes = vec![0; cells.len() * 8];
    stream
        .read_exact(&mut bytes)
        .map_err(|error| format!("a neighbour is gone: {error}"))?;
    for (cell, bytes) in cells.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *cell = f64::from_le_bytes(*bytes);
    }
    Ok(())
}
