//! Who listens and sends on the network between the hosts cannot replay or splice a stream.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use hotspare_replica::frame::{FrameReader, HEADER_BYTES};
use hotspare_replica::fuzz::{receive, stream};
use hotspare_replica::{Channel, Identity, Incoming, Receiver, Security, StagingLimits, keys};

/// Bytes of the head of a TLS record: kind, version, length (RFC 8446, 5.1).
const RECORD_HEAD: usize = 5;

fn identity() -> (tempfile::TempDir, Security) {
    let directory = tempfile::tempdir().unwrap();
    keys::issue(directory.path(), &["host".to_owned()]).unwrap();
    let identity = Identity::load(directory.path(), "host").unwrap();
    (directory, Security::Tls(Arc::new(identity)))
}

/// What a spare makes of what `say` sends it.
fn spare_hears(security: &Security, say: impl FnOnce(TcpStream) + Send) -> io::Result<Vec<u64>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::scope(|scope| {
        scope.spawn(move || say(TcpStream::connect(address).unwrap()));
        let channel =
            Channel::accepted(listener.accept()?.0, security).map_err(io::Error::other)?;
        let mut receiver = Receiver::new(channel, StagingLimits::default());
        let mut epochs = Vec::new();
        loop {
            match receiver.next() {
                Ok(Incoming::Checkpoint(staged)) => epochs.push(staged.position().epoch.0),
                Ok(Incoming::Goodbye(_)) => return Ok(epochs),
                Ok(_) => {}
                Err(error) => return Err(io::Error::other(format!("{error} after {epochs:?}"))),
            }
        }
    })
}

/// An honest primary says `words` through somebody who may change what passes; all that passed to
/// the spare.
fn through(
    security: &Security,
    words: &[u8],
    change: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>> + Send,
) -> (io::Result<Vec<u64>>, Vec<u8>) {
    let tap = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tap.local_addr().unwrap();
    let passed = std::sync::Mutex::new(Vec::new());
    let heard = thread::scope(|scope| {
        scope.spawn(move || {
            let stream = TcpStream::connect(address).unwrap();
            let Ok(mut channel) = Channel::dialled(stream, security) else { return };
            // A spare that hangs up is what is looked for here.
            let _ = channel.write_all(words).and_then(|()| channel.flush());
            let _ = channel.read(&mut [0; 1]);
        });
        let near = tap.accept().unwrap().0;
        let passed = &passed;
        spare_hears(security, move |far| carry(near, far, passed, change))
    });
    (heard, passed.into_inner().unwrap())
}

/// Passes records on, and the answers back.
fn carry(
    mut near: TcpStream,
    mut far: TcpStream,
    passed: &std::sync::Mutex<Vec<u8>>,
    mut change: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>>,
) {
    let (mut back, mut forth) = (far.try_clone().unwrap(), near.try_clone().unwrap());
    thread::spawn(move || {
        let _ = io::copy(&mut back, &mut forth);
        let _ = forth.shutdown(std::net::Shutdown::Both);
    });
    for number in 0.. {
        let mut record = vec![0; RECORD_HEAD];
        if near.read_exact(&mut record).is_err() {
            break;
        }
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(RECORD_HEAD + length, 0);
        if near.read_exact(&mut record[RECORD_HEAD..]).is_err() {
            break;
        }
        for record in change(number, record) {
            passed.lock().unwrap().extend_from_slice(&record);
            if far.write_all(&record).is_err() {
                return;
            }
        }
    }
    let _ = far.shutdown(std::net::Shutdown::Both);
}

/// Some streams of several records, with checkpoints.
fn words() -> Vec<u8> {
    let long = (0..64).map(stream).find(|words| words.len() > 60_000);
    long.expect("one is long")
}

#[test]
fn with_keys_a_recorded_stream_means_nothing_to_another_connection() {
    let (_directory, security) = identity();
    let words = words();
    let sent = receive(&words).0.len();
    let (heard, recorded) = through(&security, &words, |_, record| vec![record]);
    assert_eq!(heard.unwrap().len(), sent, "an honest stream passes");
    let replayed = spare_hears(&security, |mut far| {
        let _ = far.write_all(&recorded);
        let _ = far.shutdown(std::net::Shutdown::Write);
        let _ = far.read_to_end(&mut Vec::new());
    });
    let error = replayed.unwrap_err().to_string();
    assert!(error.contains("TLS handshake"), "{error}");
}

#[test]
fn with_keys_a_stream_that_is_spliced_ends_there() {
    let (_directory, security) = identity();
    let words = words();
    let sent = receive(&words).0.len();
    let (_, other) = through(&security, &words, |_, record| vec![record]);
    // A record of another connection: the last whole one of its kind.
    let mut at = 0;
    let mut foreign = Vec::new();
    while let Some(head) = other.get(at..at + RECORD_HEAD) {
        let end = at + RECORD_HEAD + usize::from(u16::from_be_bytes([head[3], head[4]]));
        foreign = other[at..end].to_vec();
        at = end;
    }
    // Client hello, change cipher spec, certificate and the like come first; then words.
    const FIRST: usize = 6;
    type Change<'a> = (&'a str, Box<dyn FnMut(usize, Vec<u8>) -> Vec<Vec<u8>> + Send>);
    let mut waiting = None;
    let changes: Vec<Change<'_>> = vec![
        ("dropped", Box::new(|number, record| if number == FIRST { vec![] } else { vec![record] })),
        (
            "repeated",
            Box::new(|number, record| match number {
                FIRST => vec![record.clone(), record],
                _ => vec![record],
            }),
        ),
        (
            "swapped",
            Box::new(move |number, record| match number {
                FIRST => {
                    waiting = Some(record);
                    vec![]
                }
                _ => [record].into_iter().chain(waiting.take()).collect(),
            }),
        ),
        (
            "foreign",
            Box::new(move |number, record| match number {
                FIRST => vec![foreign.clone(), record],
                _ => vec![record],
            }),
        ),
        (
            "changed",
            Box::new(|number, mut record| {
                if number == FIRST {
                    record[RECORD_HEAD] ^= 1;
                }
                vec![record]
            }),
        ),
    ];
    for (what, change) in changes {
        let (heard, _) = through(&security, &words, change);
        let error = heard.expect_err(what).to_string();
        assert!(error.contains("after ["), "{what}: {error}");
        let whole = error.split("after [").nth(1).unwrap().split(',').count();
        assert!(whole <= sent, "{what}: {error}");
    }
}

/// Without keys there are no secrets, so whoever can write on the wire can say anything. But what
/// is spliced by accident, or by somebody who only has recordings, is no checkpoint.
#[test]
fn without_keys_no_checkpoint_is_made_of_two() {
    let (one, other) = (stream(3), stream(9));
    let (honest, rest): (Vec<u64>, Vec<u64>) = (receive(&one).0, receive(&other).0);
    let (ours, theirs) = (frames(&one), frames(&other));
    let mut refused = 0;
    for at in 1..ours.len() {
        for from in [1, theirs.len() / 2, theirs.len() - 1] {
            let spliced = [ours[..at].concat(), theirs[from..].concat()].concat();
            let (committed, error) = receive(&spliced);
            for digest in &committed {
                let known = honest.contains(digest) || rest.contains(digest);
                assert!(known, "a checkpoint of two, spliced at {at} and {from}");
            }
            refused += usize::from(error.is_some());
        }
    }
    assert!(refused > ours.len(), "{refused} of {} refused", 3 * ours.len());
}

fn frames(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let mut rest = bytes;
        let length = match FrameReader::default().read(&mut rest) {
            Ok(frame) => HEADER_BYTES + frame.payload.len(),
            Err(error) => panic!("an honest stream: {error}"),
        };
        all.push(bytes[..length].to_vec());
        bytes = &bytes[length..];
    }
    all
}
