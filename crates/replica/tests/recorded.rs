//! Each version of the stream that this program speaks is read as it was once spoken: recorded by
//! `cargo run --release -p hotspare-torture --example record_stream`.

use std::io::{self, Read, Write};

use hotspare_image::{Checkpoint, NodeId, Position, Term};
use hotspare_replica::frame::{FrameReader, Kind};
use hotspare_replica::message::{VERSION_MAX, VERSION_MIN, VERSION_OF_KEPT, open};
use hotspare_replica::{
    GoodbyeCode, Greeting, Hello, HostFacts, HostRole, Incoming, Receiver, Reply, StagingLimits,
    Welcome, greeting,
};

/// Version, what the primary said, what the spare answered.
const RECORDED: [(u32, &[u8], &[u8]); 3] = [
    (3, include_bytes!("recorded/v3-primary.bin"), include_bytes!("recorded/v3-spare.bin")),
    (4, include_bytes!("recorded/v4-primary.bin"), include_bytes!("recorded/v4-spare.bin")),
    (5, include_bytes!("recorded/v5-primary.bin"), include_bytes!("recorded/v5-spare.bin")),
];

/// The other end of a conversation that is over.
struct Recorded<'a>(&'a [u8]);

impl Read for Recorded<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Recorded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hello(role: HostRole) -> Hello {
    let (version_min, version_max) = greeting::versions();
    Hello {
        version_min,
        version_max,
        role,
        node: NodeId(1),
        guest: None,
        term: Term(0),
        facts: HostFacts { kernel: "6.18".into(), cpu_features: vec![], others: vec![] },
        heart_port: 1,
        listen_port: None,
    }
}

#[test]
fn there_is_a_recording_of_each_version_that_is_spoken() {
    let versions: Vec<u32> = RECORDED.iter().map(|(version, ..)| *version).collect();
    assert_eq!(versions, (VERSION_MIN..=VERSION_MAX).collect::<Vec<_>>());
}

/// This program as the spare of a primary of then.
#[test]
fn a_primary_of_each_version_is_followed() {
    for (version, primary, _) in RECORDED {
        let own = hello(HostRole::Spare);
        let greeting = Greeting::exchange(Recorded(primary), &own, |_| Ok(())).expect("a greeting");
        assert_eq!(greeting.version, version, "the highest that both speak");
        let (rest, welcome, peer) = greeting.join(Term(0)).expect("a welcome");
        assert_eq!((peer.guest.as_deref(), welcome.term), (Some("recorded"), Term(1)));
        assert!(welcome.settings.contains(&("guest".into(), "recorded".into())));
        let mut receiver = Receiver::new(rest, StagingLimits::default());
        let (mut checkpoints, mut goodbye) = (Vec::new(), None);
        let (mut page_bytes, mut file_bytes) = (0, 0);
        while goodbye.is_none() {
            match receiver.next().unwrap_or_else(|error| panic!("version {version}: {error}")) {
                Incoming::Checkpoint(mut staged) => {
                    let state = Checkpoint::from_bytes(staged.state()).expect("an image");
                    assert_eq!(state.position, staged.position());
                    assert!(!state.processes.is_empty() && !state.spaces.is_empty());
                    assert_eq!(staged.is_full(), checkpoints.is_empty());
                    page_bytes += staged.page_bytes();
                    file_bytes += staged.file_bytes();
                    while staged.next_run().expect("runs").is_some() {}
                    checkpoints.push(state.position);
                }
                Incoming::Goodbye(words) => goodbye = Some(words.code),
                _ => {}
            }
        }
        assert_eq!(goodbye, Some(GoodbyeCode::GuestEnded));
        assert!(checkpoints.len() >= 3 && checkpoints.is_sorted(), "{checkpoints:?}");
        assert!(page_bytes > 0 && file_bytes > 0, "{page_bytes} {file_bytes}");
    }
}

/// This program as the primary of a spare of then: what it answers is understood.
#[test]
fn a_spare_of_each_version_is_understood() {
    for (version, primary, spare) in RECORDED {
        let own = hello(HostRole::Primary);
        let greeting = Greeting::exchange(Recorded(spare), &own, |_| Ok(())).expect("a greeting");
        assert_eq!(greeting.version, version);
        let mut acknowledged = Vec::new();
        let (mut frames, mut rest) = (FrameReader::default(), spare);
        while let Ok(frame) = frames.read(&mut rest) {
            match frame.kind {
                Kind::Hello => drop(open::<Hello>(&frame).expect("a hello")),
                Kind::Welcome => assert_eq!(open::<Welcome>(&frame).unwrap().version, version),
                Kind::Kept => assert!(version >= VERSION_OF_KEPT),
                Kind::Ack => acknowledged.push(open::<Position>(&frame).expect("a position")),
                kind => panic!("version {version}: a spare says {kind:?}"),
            }
        }
        let sent = ends(primary);
        assert!(acknowledged.len() >= 3 && acknowledged.is_sorted(), "{acknowledged:?}");
        assert!(acknowledged.iter().all(|position| sent.contains(position)));
        // The reader of answers believes them, and none before it was sent.
        assert!(matches!(read_first(spare, &sent), Ok(Reply::Committed(_))));
        assert!(read_first(spare, &[]).is_err(), "an acknowledgement of nothing is believed");
    }
}

/// Checkpoints that a primary has ended.
fn ends(primary: &[u8]) -> Vec<Position> {
    let (mut frames, mut rest, mut all) = (FrameReader::default(), primary, Vec::new());
    while let Ok(frame) = frames.read(&mut rest) {
        if frame.kind == Kind::CheckpointEnd {
            all.push(open::<hotspare_replica::message::CheckpointEnd>(&frame).unwrap().position);
        }
    }
    all
}

/// The first answer of a spare to a primary that has sent these checkpoints.
fn read_first(spare: &[u8], sent: &[Position]) -> Result<Reply, hotspare_replica::FrameError> {
    let (mut frames, mut rest) = (FrameReader::default(), spare);
    // The greeting: Hello and Welcome.
    for _ in 0..2 {
        frames.read(&mut rest)?;
    }
    let (sender, _writer, mut replies) =
        hotspare_replica::sender(io::sink(), rest, usize::MAX, hotspare_replica::Compression::Off);
    for (index, position) in sent.iter().enumerate() {
        sender.begin(*position, Term(1), index == 0).expect("memory takes it");
        sender.end(*position, None).expect("memory takes it");
    }
    replies.next()
}
