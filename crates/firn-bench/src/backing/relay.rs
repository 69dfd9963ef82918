//! A TCP relay with a delay. It simulates the round trip time of a network without netem of the kernel.
//!
//! The relay holds the bytes of each direction for half of the round trip time, and keeps their order. It does not
//! limit the throughput, because any number of bytes may be on their way at the same time.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Starts a relay to `target` and returns the address on which it listens. The relay ends with the process.
pub fn start(target: SocketAddr, round_trip: Duration) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // A client that cannot be served sees its connection closed.
            let _ = serve(client, target, round_trip / 2);
        }
    });
    Ok(address)
}

/// Connects a client with the target. Each direction has two threads, which end when the connection ends.
fn serve(client: TcpStream, target: SocketAddr, delay: Duration) -> std::io::Result<()> {
    let server = TcpStream::connect(target)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    pass_on(client.try_clone()?, server.try_clone()?, delay);
    pass_on(server, client, delay);
    Ok(())
}

/// Starts to send everything that arrives on `from` to `to`, after a delay.
fn pass_on(from: TcpStream, to: TcpStream, delay: Duration) {
    let (send, receive) = channel();
    std::thread::spawn(move || receive_and_queue(from, &send, delay));
    std::thread::spawn(move || deliver(&receive, to));
}

/// Reads bytes and queues them with the time at which they are due.
fn receive_and_queue(mut from: TcpStream, send: &Sender<(Instant, Vec<u8>)>, delay: Duration) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if send
            .send((Instant::now() + delay, buffer[..n].to_vec()))
            .is_err()
        {
            break;
        }
    }
}

/// Sends queued bytes when they are due. Closes `to` after the last of them.
fn deliver(receive: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
    for (due, bytes) in receive {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
