//! `docs/formats/stream.md` and the code say the same.

use hotspare_image::files::FileIdentity;
use hotspare_image::memory::{MmId, PageOwner};
use hotspare_image::{Epoch, EventIndex, NodeId, Position, Term};
use hotspare_replica::bases::{BASES_MAX, PAGE};
use hotspare_replica::frame::{
    FrameBuffer, FrameReader, HEADER_BYTES, Kind, MAGIC, PAYLOAD_BYTES_MAX,
};
use hotspare_replica::heartbeat;
use hotspare_replica::message::{
    CheckpointBegin, CheckpointEnd, Refuse, RefuseCode, SwitchoverOffer, open, seal, seal_packet,
};
use hotspare_replica::pages::{
    Encoding, PAGES_PER_FRAME_MAX, PageDecoder, PageEncoder, PageRun, RUNS_PER_FRAME_MAX,
    encode_discard_runs,
};
use hotspare_replica::{Goodbye, GoodbyeCode, Hello, HostFacts, HostRole, MemberEntry, Welcome};
use minicbor::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64;

const PAGE_OF_THE_FORMAT: &str = include_str!("../../../docs/formats/stream.md");

/// XXH3-64 of the page's tables. When this changes, either the format did (then the version must),
/// or only the words: read the tables again with the code beside them.
const TABLES_HASH: u64 = 0x6894_de7f_f2cb_d261;

const POSITION: Position = Position { epoch: Epoch(7), event: EventIndex(2) };

fn small<T: Encode<()> + for<'b> Decode<'b, ()>>(kind: Kind, message: &T) -> Vec<u8> {
    let mut buffer = FrameBuffer::default();
    let bytes = seal(&mut buffer, kind, message).to_vec();
    let mut frames = FrameReader::default();
    let frame = frames.read(&mut bytes.as_slice()).unwrap();
    let again: T = open(&frame).unwrap();
    assert_eq!(seal(&mut buffer, kind, &again), bytes, "{kind:?} changes when read and written");
    bytes
}

fn raw(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut buffer = FrameBuffer::default();
    buffer.extend(payload);
    buffer.seal(kind, 0).to_vec()
}

fn hello() -> Hello {
    Hello {
        version_min: 1,
        version_max: 1,
        role: HostRole::Spare,
        node: NodeId(5),
        guest: Some("g".into()),
        term: Term(3),
        facts: HostFacts {
            kernel: "6.18".into(),
            cpu_features: vec!["avx2".into()],
            others: vec![("page".into(), "4096".into())],
        },
        heart_port: 7001,
        listen_port: Some(7000),
    }
}

fn pages() -> Vec<u8> {
    let mut buffer = FrameBuffer::default();
    let runs = [PageRun { first: 0x1000, pages: 2 }];
    let bytes = [vec![0; PAGE], vec![0xaa; PAGE]].concat();
    let owner = PageOwner::Mm(MmId(1));
    let pages: Vec<&[u8]> = bytes.chunks_exact(PAGE).collect();
    PageEncoder::default().squeeze(owner, &runs, &pages, buffer.payload());
    let bytes = buffer.seal(Kind::Pages, 1).to_vec();
    let mut seen = 0;
    let payload = &bytes[HEADER_BYTES..];
    PageDecoder::default()
        .decode(payload, true, |_, _, _| {
            seen += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, 2);
    bytes
}

fn discard() -> Vec<u8> {
    let mut buffer = FrameBuffer::default();
    let runs = [PageRun { first: 0x1000, pages: 2 }];
    encode_discard_runs(PageOwner::Mm(MmId(1)), &runs, buffer.payload());
    buffer.seal(Kind::Pages, 0).to_vec()
}

fn golden(kind: Kind) -> Vec<u8> {
    let text = || "why".to_owned();
    match kind {
        Kind::Hello => small(kind, &hello()),
        Kind::Welcome => {
            let settings = vec![("epoch_ms".into(), "100".into())];
            let heart_key = vec![1, 2, 3];
            small(kind, &Welcome { version: 1, term: Term(3), rank: 1, heart_key, settings })
        }
        Kind::Refuse => small(kind, &Refuse { code: RefuseCode::Host, text: text() }),
        Kind::CheckpointBegin => {
            small(kind, &CheckpointBegin { position: POSITION, term: Term(3), full: true })
        }
        Kind::Pages => pages(),
        Kind::State | Kind::FileChanges | Kind::Event | Kind::Packet => raw(kind, b"bytes"),
        Kind::CheckpointEnd => small(
            kind,
            &CheckpointEnd {
                position: POSITION,
                frames: 4,
                hash: 0x1122_3344_5566_7788,
                inputs: Some(9),
            },
        ),
        Kind::Abort | Kind::Ack => small(kind, &POSITION),
        Kind::Files => small(
            kind,
            &vec![FileIdentity {
                path: b"/bin/sh".to_vec(),
                size_bytes: 7,
                mode: 0o100_755,
                blake3: [0xab; 32],
            }],
        ),
        Kind::Members => {
            let (heart, listens) = ("10.0.0.2:7001".into(), Some("10.0.0.2:7000".into()));
            small(
                kind,
                &vec![MemberEntry {
                    node: NodeId(5),
                    rank: 1,
                    ready: true,
                    heart,
                    listens,
                    stands_by: Some(false),
                }],
            )
        }
        Kind::SwitchoverOffer => {
            small(kind, &SwitchoverOffer { term: Term(4), position: POSITION })
        }
        Kind::SwitchoverRefused => small(kind, &text()),
        Kind::Kept => raw(kind, &[[1; 32].as_slice(), &[2; 16]].concat()),
        Kind::GuestDied | Kind::Path => raw(kind, b""),
        Kind::Output | Kind::Input => {
            let mut buffer = FrameBuffer::default();
            seal_packet(&mut buffer, kind, 7, b"bytes").to_vec()
        }
        Kind::Goodbye => small(kind, &Goodbye { code: GoodbyeCode::Dropped, text: text() }),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_golden_frames_of_the_page_are_what_the_code_writes() {
    let (_, block) = PAGE_OF_THE_FORMAT.split_once("```golden\n").expect("a golden block");
    let (block, _) = block.split_once("```").expect("its end");
    let mut written: String =
        Kind::ALL.iter().map(|kind| format!("{kind:?} {}\n", hex(&golden(*kind)))).collect();
    written += &format!("Pages (discarded) {}\n", hex(&discard()));
    assert!(block == written, "the page should say:\n{written}");
}

#[test]
fn the_tables_of_the_page_name_the_constants_of_the_code() {
    let says = |row: String| assert!(PAGE_OF_THE_FORMAT.contains(&row), "the page lacks: {row}");
    says(format!("magic `{}`", MAGIC.map(|byte| format!("{byte:02x}")).join(" ")));
    says(format!("| {HEADER_BYTES} | | payload |"));
    says(format!("payload length, at most {PAYLOAD_BYTES_MAX} |"));
    says(format!("at most {RUNS_PER_FRAME_MAX} |"));
    says(format!("described runs, at most {PAGES_PER_FRAME_MAX}:"));
    says(format!("of {BASES_MAX} remembered pages"));
    says(format!("| {PAGE} bytes |"));
    let heart = heartbeat::MAGIC.map(|byte| format!("{byte:02x}")).join(" ");
    says(format!("| 0 | 4 | magic `{heart}`"));
    says(format!("UDP datagrams of {} bytes", heartbeat::BEAT_BYTES));
    for kind in Kind::ALL {
        says(format!("| {} | {kind:?} |", kind.number()));
    }
    for encoding in Encoding::ALL {
        says(format!("| {} | {encoding:?} |", encoding.number()));
    }
}

#[test]
fn the_tables_of_the_page_have_not_moved() {
    let rows = PAGE_OF_THE_FORMAT.lines().filter(|line| line.starts_with('|'));
    let hash = xxh3_64(rows.collect::<Vec<_>>().join("\n").as_bytes());
    assert_eq!(hash, TABLES_HASH, "the tables hash to {hash:#018x}");
}
