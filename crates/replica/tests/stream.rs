//! Two ends over a real socket.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hotspare_cluster::Closed;
use hotspare_image::files::FileIdentity;
use hotspare_image::memory::{MmId, PageOwner};
use hotspare_image::{Epoch, NodeId, Position, Term};
use hotspare_replica::bases::PAGE;
use hotspare_replica::frame::FrameError;
use hotspare_replica::fuzz::bytes_of;
use hotspare_replica::kept::digest;
use hotspare_replica::message::{Refuse, RefuseCode};
use hotspare_replica::{
    Channel, ChannelError, Compression, Content, Goodbye, GoodbyeCode, Greeting, GreetingError,
    Hello, HostFacts, HostRole, Identity, Incoming, Keeper, PageBatch, PageRun, Receiver, Replier,
    Reply, Security, Staged, StagingLimits, Welcome, closed, keys, sender,
};

const PLAIN: Security = Security::Plain { insecure: false };

fn pair(
    near: &Security,
    far: &Security,
) -> (Result<Channel, ChannelError>, Result<Channel, ChannelError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| Channel::accepted(listener.accept().unwrap().0, far));
        (Channel::connect(&address, near), accepted.join().unwrap())
    })
}

fn plain_pair() -> (Channel, Channel) {
    let (near, far) = pair(&PLAIN, &PLAIN);
    (near.unwrap(), far.unwrap())
}

fn at(epoch: u64) -> Position {
    Position::checkpoint(Epoch(epoch))
}

fn batch(first: u64, bytes: Vec<u8>) -> Arc<PageBatch> {
    let run = PageRun { first, pages: (bytes.len() / PAGE) as u32 };
    Arc::new(PageBatch::new(PageOwner::Mm(MmId(1)), vec![run], bytes).unwrap())
}

/// Sends `epochs` checkpoints of `pages` pages each and checks what arrives and is acknowledged.
fn checkpoints_cross(primary: Channel, spare: Channel, pages: usize, compression: Compression) {
    let (read, write, _) = primary.split().unwrap();
    let (sender, writer, mut replies) = sender(write, read, 4 << 20, compression);
    let (spare_read, spare_write, _) = spare.split().unwrap();
    let limits = StagingLimits { memory_bytes: 1 << 20, ..StagingLimits::default() };
    let mut receiver = Receiver::new(spare_read, limits);
    let mut replier = Replier::new(spare_write);
    let bytes_of = |epoch: u64| -> Vec<u8> {
        (0..pages * PAGE).map(|at| (at / 512) as u8 ^ epoch as u8).collect()
    };
    thread::scope(|scope| {
        scope.spawn(|| writer.run().unwrap());
        scope.spawn(|| {
            for epoch in 1..=3 {
                sender.begin(at(epoch), Term(1), epoch == 1).unwrap();
                sender.pages(batch(0x10_0000, bytes_of(epoch))).unwrap();
                sender.state(Arc::new(vec![epoch as u8; 3 << 20])).unwrap();
                sender.file_changes(Arc::new(vec![epoch as u8 + 1; 5 << 20])).unwrap();
                sender.end(at(epoch), None).unwrap();
                let committed = sender.wait_committed(at(epoch), Duration::from_secs(60)).unwrap();
                assert_eq!(committed.unwrap().position(), at(epoch));
            }
            sender.goodbye(&Goodbye { code: GoodbyeCode::Stopped, text: "done".into() }).unwrap();
        });
        scope.spawn(move || {
            for epoch in 1..=3 {
                let Reply::Committed(committed) = replies.next().unwrap() else { panic!() };
                assert_eq!(committed.position(), at(epoch));
            }
        });
        for epoch in 1..=3 {
            let Incoming::Checkpoint(mut checkpoint) = receiver.next().unwrap() else { panic!() };
            assert_eq!((checkpoint.position(), checkpoint.is_full()), (at(epoch), epoch == 1));
            assert!(checkpoint.state() == vec![epoch as u8; 3 << 20]);
            let mut got = Vec::new();
            let collect = |_, address, content: Content<'_>| {
                assert_eq!(address, 0x10_0000 + got.len() as u64);
                match content {
                    Content::Zero(pages) => got.resize(got.len() + pages as usize * PAGE, 0),
                    Content::Bytes(bytes) => got.extend_from_slice(bytes),
                    Content::Discard(_) => panic!("nobody discarded {address:#x}"),
                }
                Ok::<(), std::io::Error>(())
            };
            checkpoint.for_each_run(collect).unwrap();
            assert!(got == bytes_of(epoch));
            let mut files = Vec::new();
            checkpoint.files().read_to_end(&mut files).unwrap();
            assert!(files == vec![epoch as u8 + 1; 5 << 20]);
            replier.acknowledge(at(epoch)).unwrap();
        }
        let Incoming::Goodbye(goodbye) = receiver.next().unwrap() else { panic!() };
        assert_eq!(goodbye.code, GoodbyeCode::Stopped);
    });
}

/// Has pages that are filled with one byte each.
struct Filled(Vec<u8>);

impl Keeper for Filled {
    fn page(&mut self, number: u32, page: &mut [u8]) -> std::io::Result<()> {
        let byte = self.0.get(number as usize).ok_or(std::io::ErrorKind::NotFound)?;
        page.fill(*byte);
        Ok(())
    }
}

#[test]
fn what_a_spare_has_kept_travels_as_numbers_until_it_has_the_first_checkpoint() {
    let (primary, spare) = plain_pair();
    let (read, write, _) = primary.split().unwrap();
    let (sender, writer, mut replies) = sender(write, read, 4 << 20, Compression::Off);
    let (spare_read, spare_write, _) = spare.split().unwrap();
    let receiver = Receiver::new(spare_read, StagingLimits::default());
    let mut receiver = receiver.with_keeper(Filled(vec![3, 4]));
    let mut replier = Replier::new(spare_write);
    let filled = |byte: u8| vec![byte; PAGE];
    let key = [7; 32];
    replier.kept(&key, &[3, 4].map(|byte| digest(&key, &filled(byte)))).unwrap();
    replier.kept(&key, &[]).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| writer.run().unwrap());
        scope.spawn(move || {
            for _ in 1..=2 {
                assert!(matches!(replies.next(), Ok(Reply::Committed(_))));
            }
        });
        sender.await_kept(Duration::from_secs(60));
        for epoch in 1..=2 {
            // Where a page belongs is of no matter.
            let (first, content) = (epoch << 20, [4, 5, 3, 4].map(filled).concat());
            sender.begin(at(epoch), Term(1), epoch == 1).unwrap();
            sender.pages(batch(first, content.clone())).unwrap();
            sender.end(at(epoch), None).unwrap();
            let Incoming::Checkpoint(mut checkpoint) = receiver.next().unwrap() else { panic!() };
            let mut got = Vec::new();
            while let Some((_, address, content)) = checkpoint.next_run().unwrap() {
                assert_eq!(address, first + got.len() as u64);
                let Staged::Bytes(bytes) = content else { panic!() };
                got.extend_from_slice(&bytes);
            }
            assert!(got == content);
            let sent = sender.stats().pages;
            assert_eq!((sent.kept, sent.raw), (3, 4 * epoch - 3));
            replier.acknowledge(at(epoch)).unwrap();
        }
        sender.goodbye(&Goodbye { code: GoodbyeCode::Stopped, text: "done".into() }).unwrap();
    });
}

#[test]
fn runs_of_a_checkpoint_keep_the_order_they_were_sent_in() {
    let owner = PageOwner::Mm(MmId(1));
    let run = |first, pages| Arc::new(vec![PageRun { first, pages }]);
    let bytes = bytes_of(Compression::Always, |sender| {
        sender.begin(at(1), Term(1), true).unwrap();
        sender.pages(batch(0x1000, vec![1; PAGE])).unwrap();
        sender.discard_runs(owner, run(0x1000, 1)).unwrap();
        sender.discard_runs(owner, run(0x2000, 2)).unwrap();
        sender.zero_runs(owner, run(0x4000, 1)).unwrap();
        sender.discard_runs(owner, run(0x5000, 1)).unwrap();
        sender.pages(batch(0x1000, vec![2; PAGE])).unwrap();
        sender.discard_runs(owner, run(0x1000, 1)).unwrap();
        sender.end(at(1), None).unwrap();
    });
    let expected = [
        (0x1000, "bytes", 1),
        // Neighbours of one kind are one run, neighbours of two kinds are not.
        (0x1000, "discard", 3),
        (0x4000, "zero", 1),
        (0x5000, "discard", 1),
        (0x1000, "bytes", 2),
        (0x1000, "discard", 1),
    ];
    // With no room in memory, pages and what says where they belong go to files.
    for memory_bytes in [StagingLimits::default().memory_bytes, 16] {
        let limits = StagingLimits { memory_bytes, ..StagingLimits::default() };
        let mut receiver = Receiver::new(bytes.as_slice(), limits);
        let Incoming::Checkpoint(mut checkpoint) = receiver.next().unwrap() else { panic!() };
        let mut seen = Vec::new();
        let collect = |_, address, content: Content<'_>| {
            seen.push(match content {
                Content::Bytes(bytes) => (address, "bytes", u32::from(bytes[0])),
                Content::Zero(pages) => (address, "zero", pages),
                Content::Discard(pages) => (address, "discard", pages),
            });
            Ok::<(), std::io::Error>(())
        };
        checkpoint.for_each_run(collect).unwrap();
        assert_eq!(seen, expected);
    }
}

/// Bytes of pages in each committed checkpoint of a stream.
fn page_bytes(stream: &[u8]) -> Vec<u64> {
    let mut receiver = Receiver::new(stream, StagingLimits::default());
    let mut bytes = Vec::new();
    while let Ok(next) = receiver.next() {
        if let Incoming::Checkpoint(checkpoint) = next {
            bytes.push(checkpoint.page_bytes());
        }
    }
    bytes
}

#[test]
fn a_page_is_sent_whole_where_the_spare_may_not_have_it() {
    let mut page = vec![1; PAGE];
    let mut next = |sender: &hotspare_replica::Sender| {
        page[7] += 1;
        sender.pages(batch(0x1000, page.clone())).unwrap();
    };
    let run = Arc::new(vec![PageRun { first: 0x1000, pages: 1 }]);
    let stream = bytes_of(Compression::Off, |sender| {
        for epoch in 1..=6 {
            sender.begin(at(epoch), Term(1), epoch == 1 || epoch == 5).unwrap();
            if epoch == 4 {
                sender.discard_runs(PageOwner::Mm(MmId(1)), run.clone()).unwrap();
            }
            next(sender);
            if epoch == 2 {
                sender.abort(at(epoch)).unwrap();
            } else {
                sender.end(at(epoch), None).unwrap();
            }
        }
    });
    let whole = PAGE as u64;
    // First, after an abort, after a discard, in a full checkpoint, and then one line.
    assert_eq!(page_bytes(&stream), [whole, whole, whole, whole, 128]);
}

fn identities(names: &[&str]) -> (tempfile::TempDir, Vec<Security>) {
    let directory = tempfile::tempdir().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    keys::issue(directory.path(), &names).unwrap();
    let load =
        |name: &String| Security::Tls(Arc::new(Identity::load(directory.path(), name).unwrap()));
    let loaded = names.iter().map(load).collect();
    (directory, loaded)
}

#[test]
fn checkpoints_cross_plain_tcp_unchanged() {
    let (primary, spare) = plain_pair();
    checkpoints_cross(primary, spare, 1000, Compression::Adaptive);
}

#[test]
fn checkpoints_cross_compressed_unchanged() {
    let (primary, spare) = plain_pair();
    checkpoints_cross(primary, spare, 1000, Compression::Always);
}

#[test]
fn checkpoints_cross_tls_unchanged() {
    let (_directory, keys) = identities(&["left", "right"]);
    let (primary, spare) = pair(&keys[0], &keys[1]);
    checkpoints_cross(primary.unwrap(), spare.unwrap(), 1000, Compression::Adaptive);
}

#[test]
fn a_host_with_keys_of_another_ca_gets_nothing() {
    let (_one, ours) = identities(&["left"]);
    let (_two, theirs) = identities(&["right"]);
    let (near, far) = pair(&theirs[0], &ours[0]);
    assert!(matches!(near, Err(ChannelError::Handshake { .. })), "{near:?}");
    assert!(matches!(far, Err(ChannelError::Handshake { .. })), "{far:?}");
}

#[test]
fn a_host_without_tls_gets_nothing() {
    let (_directory, keys) = identities(&["left"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    near.write_all(b"HSpr, says the stranger, hoping for a hello").unwrap();
    let far = Channel::accepted(listener.accept().unwrap().0, &keys[0]);
    assert!(matches!(far, Err(ChannelError::Handshake { .. })), "{far:?}");
    drop(far);
    let mut answer = Vec::new();
    let _ = near.read_to_end(&mut answer);
    assert!(answer.len() < 64, "more than an alert: {answer:?}");
}

#[test]
fn keys_are_readable_by_their_owner_alone() {
    let (directory, _) = identities(&["left"]);
    for name in ["ca.key", "left.key"] {
        let mode = fs::metadata(directory.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let again = keys::issue(directory.path(), &["left".to_owned()]);
    assert!(again.is_err(), "an existing key was overwritten");
    keys::issue(directory.path(), &["right".to_owned()]).unwrap();
    assert!(keys::issue(directory.path(), &["../x".to_owned()]).is_err());
}

#[test]
fn plain_text_beyond_this_host_needs_insecure() {
    let error = Channel::connect("192.0.2.1:1", &PLAIN).unwrap_err();
    assert!(matches!(error, ChannelError::PlainText(_)), "{error}");
    assert!(error.to_string().contains("--insecure"));
}

fn hello(role: HostRole) -> Hello {
    Hello {
        version_min: 1,
        version_max: 2,
        role,
        node: NodeId(1),
        guest: None,
        term: Term(4),
        facts: HostFacts::default(),
        heart_port: 7000,
        listen_port: None,
    }
}

fn welcome() -> Welcome {
    Welcome { version: 0, term: Term(4), rank: 2, heart_key: vec![9; 32], settings: Vec::new() }
}

type Greeted<T> = Result<T, GreetingError>;

fn greet(
    primary: &Hello,
    spare: &Hello,
    judge: impl FnOnce(&Hello) -> Result<(), Refuse> + Send,
) -> (Greeted<Hello>, Greeted<Welcome>) {
    let (near, far) = plain_pair();
    thread::scope(|scope| {
        let primary = scope.spawn(move || {
            let mut greeting = Greeting::exchange(near, primary, judge)?;
            greeting.await_spare()?;
            greeting.welcome(&welcome()).map(|(_, peer)| peer)
        });
        let joined = Greeting::exchange(far, spare, |_| Ok(())).and_then(|g| g.join(Term(3)));
        let joined = joined.map(|(_, welcome, _)| welcome);
        (primary.join().unwrap(), joined)
    })
}

#[test]
fn a_primary_and_a_spare_agree_on_the_newest_common_version() {
    let spare = Hello { version_max: 7, ..hello(HostRole::Spare) };
    let (primary, spare) = greet(&hello(HostRole::Primary), &spare, |_| Ok(()));
    assert_eq!(primary.unwrap().version_max, 7);
    assert_eq!(spare.unwrap(), Welcome { version: 2, ..welcome() });
}

#[test]
fn a_version_gap_names_the_host_to_upgrade() {
    let spare = Hello { version_min: 3, version_max: 3, ..hello(HostRole::Spare) };
    let (primary, spare) = greet(&hello(HostRole::Primary), &spare, |_| Ok(()));
    let text = primary.unwrap_err().to_string();
    assert!(text.contains("primary speaks protocol 1–2, the spare 3: upgrade"), "{text}");
    assert!(text.ends_with("on the primary"), "{text}");
    assert!(spare.is_err());
}

#[test]
fn a_refusal_reaches_the_other_side_with_its_reason() {
    let text = "kernels differ: 6.18 here, 6.19 there".to_owned();
    let refuse = Refuse { code: RefuseCode::Host, text: text.clone() };
    let judge = move |_: &Hello| Err(refuse);
    let (primary, spare) = greet(&hello(HostRole::Primary), &hello(HostRole::Spare), judge);
    assert!(matches!(primary, Err(GreetingError::Refusing { code: RefuseCode::Host, .. })));
    let Err(GreetingError::Refused { code: RefuseCode::Host, text: seen, .. }) = spare else {
        panic!("{spare:?}");
    };
    assert_eq!(seen, text);
}

#[test]
fn a_peer_that_dies_is_told_from_one_that_leaves() {
    let (primary, spare) = plain_pair();
    drop(primary);
    let mut receiver = Receiver::new(spare, StagingLimits::default());
    let error = receiver.next().unwrap_err();
    assert_eq!(closed(&error), Closed::ByPeer);

    let (primary, spare) = plain_pair();
    let (read, write, _) = primary.split().unwrap();
    let (sender, writer, _replies) = sender(write, read, 1 << 20, Compression::Off);
    drop(sender);
    writer.run().unwrap();
    let mut receiver = Receiver::new(spare, StagingLimits::default());
    assert!(matches!(receiver.next().unwrap(), Incoming::Goodbye(_)));
}

#[test]
fn a_spare_that_acknowledges_the_future_is_not_believed() {
    let (primary, spare) = plain_pair();
    let (read, write, _) = primary.split().unwrap();
    let (sender, _writer, mut replies) = sender(write, read, 1 << 20, Compression::Off);
    Replier::new(spare).acknowledge(at(9)).unwrap();
    assert!(matches!(replies.next(), Err(FrameError::OutOfPlace { .. })));
    assert!(sender.broken().is_some());
    assert!(sender.acknowledged().is_none());
}

#[test]
fn a_slow_spare_holds_the_sender_back_within_its_limit() {
    let (primary, spare) = plain_pair();
    let (read, write, hangup) = primary.split().unwrap();
    let limit = 1 << 20;
    let (sender, writer, _replies) = sender(write, read, limit, Compression::Off);
    thread::scope(|scope| {
        scope.spawn(|| writer.run().unwrap_err());
        let feeder = scope.spawn(|| {
            sender.begin(at(1), Term(1), true).unwrap();
            // Nobody reads: this ends only when the line is cut.
            loop {
                if sender.pages(batch(0, vec![1; 64 * PAGE])).is_err() {
                    return;
                }
                assert!(sender.stats().queued_bytes <= limit);
            }
        });
        let full = || sender.room_bytes() < 65 * PAGE;
        while !full() {
            thread::yield_now();
        }
        hangup.hang_up();
        feeder.join().unwrap();
    });
    drop(spare);
}

/// A host that dies leaves its connection open.
#[test]
fn nobody_waits_for_a_spare_that_is_given_up() {
    let (primary, spare) = plain_pair();
    let (read, write, hangup) = primary.split().unwrap();
    let (sender, writer, _replies) = sender(write, read, 1 << 20, Compression::Off);
    let way = sender.packets();
    thread::scope(|scope| {
        // Nothing leaves the queue as long as nobody writes.
        let feeder = scope.spawn(|| {
            sender.begin(at(1), Term(1), true).unwrap();
            while sender.pages(batch(0, vec![1; 64 * PAGE])).is_ok() {}
        });
        while sender.room_bytes() >= 65 * PAGE {
            thread::yield_now();
        }
        way.give_up();
        feeder.join().unwrap();
        assert_eq!(sender.broken(), None, "the stream is as it was");
        hangup.hang_up();
    });
    writer.run().unwrap_err();
    drop(spare);
}

#[test]
fn a_spare_without_room_for_a_large_checkpoint_says_so_and_lives() {
    let bytes = hotspare_replica::fuzz::bytes_of(Compression::Off, |sender| {
        sender.begin(at(1), Term(1), true).unwrap();
        sender.pages(batch(0, vec![1; 64 * PAGE])).unwrap();
    });
    // A directory that is none stands for a disk that is full.
    let limits = StagingLimits { memory_bytes: 16 * PAGE, directory: "/proc/self/comm".into() };
    let error = Receiver::new(bytes.as_slice(), limits).next().unwrap_err();
    assert!(matches!(error, FrameError::Staging(_)), "{error}");
    assert_eq!(closed(&error), Closed::ByUs);
}

#[test]
fn a_long_list_of_files_arrives_in_frames_that_fit() {
    let long = |number: u32| FileIdentity {
        path: [format!("/{number}").into_bytes(), vec![b'x'; 4000]].concat(),
        size_bytes: u64::MAX - u64::from(number),
        mode: u32::MAX,
        blake3: [0xff; 32],
    };
    let sent: Vec<FileIdentity> = (0..600).map(long).collect();
    let bytes = bytes_of(Compression::Off, |sender| sender.files(&sent).unwrap());
    let mut receiver = Receiver::new(bytes.as_slice(), StagingLimits::default());
    let mut got = Vec::new();
    loop {
        match receiver.next().unwrap() {
            Incoming::Files(files) => got.extend(files),
            Incoming::Goodbye(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(got == sent);
}
