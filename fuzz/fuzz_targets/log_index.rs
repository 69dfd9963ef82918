//! Indexes of logged files: any bytes are refused or read as frames, blocks, directories and heads whose numbers may be
//! believed, and what is read is written as bytes that read the same.
#![no_main]

use arbitrary::Arbitrary;
use firn_log::block::{LayerDecoder, LayerEncoder, SpanEncoder, decode_spans};
use firn_log::frame::{Change, DecodedFrame, Frame};
use firn_log::head::{Head, VERSION};
use firn_log::resolve::{Layer, Resolver, WriterId};
use firn_log::run::FILE_BYTES_MAX;
use firn_log::table::Directory;
use libfuzzer_sys::fuzz_target;

const WRITER: WriterId = WriterId { host: 1, life: 1 };

#[derive(Arbitrary, Debug)]
enum Input {
    Index(Vec<u8>),
    /// Bodies behind headers that are right: what stands behind the checksum is tried.
    Bodies(Vec<Vec<u8>>),
    Layers(Vec<u8>),
    Spans(Vec<u8>),
    /// A directory, with as many bytes of blocks before it.
    Directory(Vec<u8>, u16),
    Head(Vec<u8>),
}

fn framed(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"FIRNFRME".to_vec();
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn read_index(mut index: &[u8]) {
    let mut resolver = Resolver::new(100);
    let mut offset = 0;
    while let DecodedFrame::Complete(frame, bytes) = Frame::decode(index) {
        let mut again = Vec::new();
        frame.encode(&mut again);
        assert_eq!(
            Frame::decode(&again),
            DecodedFrame::Complete(frame.clone(), again.len())
        );
        if let Change::Written(written) = &frame.change {
            assert!(
                written
                    .runs
                    .iter()
                    .all(|run| run.span().end <= FILE_BYTES_MAX)
            );
            assert!(written.position.checked_add(written.bytes()).is_some());
        }
        resolver.add(WRITER, offset, frame);
        offset += bytes as u64;
        index = &index[bytes..];
    }
    assert!(resolver.len() <= FILE_BYTES_MAX);
    let segments = resolver.find(0..4096);
    let ends = segments.iter().map(|segment| segment.file.end);
    let starts = segments.iter().map(|segment| segment.file.start);
    assert!(
        starts
            .skip(1)
            .eq(ends.take(segments.len().saturating_sub(1)))
    );
}

fuzz_target!(|input: Input| {
    match input {
        Input::Index(bytes) => read_index(&bytes),
        Input::Bodies(bodies) => {
            let frames: Vec<Vec<u8>> = bodies.iter().map(|body| framed(body)).collect();
            read_index(&frames.concat());
        }
        Input::Layers(bytes) => {
            let layers: Vec<Layer> = LayerDecoder::new(&bytes, WRITER).flatten().collect();
            let mut encoder = LayerEncoder::default();
            for layer in &layers {
                encoder.push(layer);
            }
            let block = encoder.finish_block().unwrap_or_default();
            let again: Vec<Layer> = LayerDecoder::new(block, WRITER).flatten().collect();
            assert_eq!(again, layers);
        }
        Input::Spans(bytes) => {
            let spans: Vec<_> = decode_spans(&bytes).flatten().collect();
            let mut encoder = SpanEncoder::default();
            for (frame, span) in &spans {
                encoder.push(*frame, span);
            }
            let block = encoder.finish_block().unwrap_or_default();
            let again: Vec<_> = decode_spans(&block).flatten().collect();
            assert_eq!(again, spans);
        }
        Input::Directory(body, blocks) => {
            let mut tail = body.clone();
            tail.extend_from_slice(&(body.len() as u32).to_le_bytes());
            tail.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
            tail.extend_from_slice(b"FIRNSORT");
            let file_bytes = tail.len() as u64 + u64::from(blocks);
            if let Some(directory) = Directory::decode(&tail, file_bytes) {
                let layers = directory.layers.iter().map(|block| block.location);
                let locations = layers.chain(directory.spans.iter().map(|block| block.location));
                for location in locations {
                    assert!(location.position + u64::from(location.bytes) <= u64::from(blocks));
                }
            }
        }
        Input::Head(body) => {
            let mut text = [format!("firn-log-{VERSION} ").as_bytes(), &body].concat();
            let checksum = crc32c::crc32c(&text);
            text.extend_from_slice(format!(" {checksum:08x}").as_bytes());
            let _ = Head::decode(&text);
            let _ = Head::decode(&body);
        }
    }
});
