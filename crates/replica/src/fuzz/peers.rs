//! Damaged answers of spares, damaged greetings, damaged heartbeats.

use std::io::{self, Read, Write};

use hotspare_cluster::{Beat, BeatRole};
use hotspare_image::{Epoch, EventIndex, NodeId, Position, Term};

use super::{Dice, SharedBytes, damage, resealed_damage};
use crate::message::{RefuseCode, seal};
use crate::receiver::Replier;
use crate::sender::{Compression, Reply, sender};
use crate::{
    Goodbye, GoodbyeCode, Greeting, GreetingError, Hello, HostFacts, HostRole, Welcome, heartbeat,
};

/// How many checkpoints the primary has sent that is answered.
const SENT: u64 = 8;

/// What an honest spare answers to some checkpoints.
fn answers(dice: &mut Dice) -> io::Result<Vec<u8>> {
    let mut written = SharedBytes::default();
    let mut replier = Replier::new(written.clone());
    if dice.below(2) == 0 {
        replier.path_open()?;
    }
    if dice.below(2) == 0 {
        let key = [dice.roll() as u8; 32];
        for _ in 0..dice.below(3) {
            replier.kept(&key, &vec![[dice.roll() as u8; 16]; 1 + dice.below(50)])?;
        }
        replier.kept(&key, &[])?;
    }
    for epoch in 1..=SENT {
        let packets: Vec<Vec<u8>> = (0..dice.below(3))
            .map(|_| {
                let length = dice.below(200);
                dice.bytes(length)
            })
            .collect();
        replier.inputs(packets.iter().map(|packet| (dice.roll() % 99, &packet[..])))?;
        replier.acknowledge(Position::checkpoint(Epoch(epoch)))?;
    }
    replier.refuse_switchover("not now")?;
    replier.goodbye(&Goodbye { code: GoodbyeCode::Stopped, text: "done".into() })?;
    written.flush()?;
    Ok(written.take())
}

/// Damaged answers; whether they were refused, and how many commits were believed.
///
/// # Panics
/// If a commit is believed of what was never sent, or that goes back.
#[must_use]
pub fn replies(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed ^ 0x7f4a_7c15);
    let Ok(valid) = answers(&mut dice) else { unreachable!("memory takes what is written") };
    let bytes = match dice.below(2) {
        0 => {
            let mut bytes = valid;
            damage(&mut bytes, &mut dice);
            bytes
        }
        _ => resealed_damage(&valid, &mut dice),
    };
    let (sender, _writer, mut reader) =
        sender(io::sink(), &bytes[..], usize::MAX, Compression::Off);
    for epoch in 1..=SENT {
        let position = Position::checkpoint(Epoch(epoch));
        // Nothing breaks before something is read.
        let _ = sender.begin(position, Term(1), epoch == 1);
        let _ = sender.end(position, None);
    }
    let mut committed = Vec::new();
    let error = loop {
        match reader.next() {
            Ok(Reply::Committed(proof)) => committed.push(proof.position()),
            Ok(Reply::Goodbye(_)) => break None,
            Ok(Reply::SwitchoverRefused(_) | Reply::PathOpen | Reply::Input(..)) => {}
            Err(error) => break Some(error),
        }
    };
    assert!(committed.is_sorted(), "commits go back: {committed:?}");
    let last = Position::checkpoint(Epoch(SENT));
    assert!(committed.iter().all(|position| *position <= last), "commits of what was never sent");
    (error.is_some(), committed.len() as u64)
}

/// A peer whose words are fixed.
struct Scripted<'a>(&'a [u8]);

impl Read for Scripted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Scripted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hello(role: HostRole, dice: &mut Dice) -> Hello {
    Hello {
        version_min: 1 + dice.below(4) as u32,
        version_max: 3 + dice.below(4) as u32,
        role,
        node: NodeId(dice.roll()),
        guest: (dice.below(2) == 0).then(|| "guest".to_owned()),
        term: Term(dice.below(5) as u64),
        facts: HostFacts {
            kernel: "6.18".into(),
            cpu_features: vec!["avx2".into(); dice.below(4)],
            others: vec![("page".into(), "4096".into())],
        },
        heart_port: 7001,
        listen_port: None,
    }
}

/// A damaged greeting, seen by a spare; whether it was refused.
#[must_use]
pub fn greeting(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed ^ 0x1331_11eb);
    let mut buffer = crate::frame::FrameBuffer::default();
    let peer = hello([HostRole::Primary, HostRole::Spare][dice.below(2)], &mut dice);
    let mut valid = seal(&mut buffer, crate::frame::Kind::Hello, &peer).to_vec();
    let welcome = Welcome {
        version: 3 + dice.below(3) as u32,
        term: Term(dice.below(9) as u64),
        rank: dice.below(3) as u32,
        heart_key: dice.bytes(32),
        settings: vec![("guest".into(), "x".into()); dice.below(4)],
    };
    valid.extend_from_slice(seal(&mut buffer, crate::frame::Kind::Welcome, &welcome));
    let bytes = match dice.below(3) {
        0 => valid.clone(),
        1 => {
            let mut bytes = valid.clone();
            damage(&mut bytes, &mut dice);
            bytes
        }
        _ => resealed_damage(&valid, &mut dice),
    };
    let own = hello(HostRole::Spare, &mut dice);
    let met = Greeting::exchange(Scripted(&bytes), &own, |_| Ok(()))
        .and_then(|greeting| greeting.join(own.term));
    match met {
        Ok((_, _, peer)) => {
            assert_eq!(peer.role, HostRole::Primary, "a spare has joined a spare");
            (false, 1)
        }
        Err(GreetingError::Refusing { code, .. }) => {
            assert_ne!(code, RefuseCode::Busy, "nobody has said that");
            (true, 0)
        }
        Err(GreetingError::Refused { .. } | GreetingError::Frame { .. }) => (true, 0),
    }
}

/// A damaged heartbeat, and one by somebody without the key; whether it was refused.
///
/// # Panics
/// If something is believed that was not signed so.
#[must_use]
pub fn beats(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed ^ 0xbf58_476d);
    let mut key = [0; 32];
    key.copy_from_slice(&dice.bytes(32));
    let roles = [BeatRole::Primary, BeatRole::SpareReady, BeatRole::Fenced, BeatRole::TakingOver];
    let beat = Beat {
        from: NodeId(dice.roll()),
        term: Term(dice.roll()),
        role: roles[dice.below(roles.len())],
        position: Position { epoch: Epoch(dice.roll()), event: EventIndex(dice.roll()) },
    };
    let sequence = dice.roll();
    let honest = heartbeat::seal(&key, &beat, sequence);
    assert_eq!(heartbeat::open(&key, &honest), Some((beat, sequence)));
    let mut bytes = honest.to_vec();
    damage(&mut bytes, &mut dice);
    let believed = heartbeat::open(&key, &bytes);
    assert!(believed.is_none() || bytes == honest, "a damaged heartbeat is believed");
    let mut other = key;
    other[dice.below(32)] ^= 1 << dice.below(8);
    assert_eq!(heartbeat::open(&other, &honest), None, "another key opens it");
    // Signed by somebody who has the key, and nonsense all the same.
    let mut signed = bytes;
    if signed.len() == heartbeat::BEAT_BYTES {
        let body = heartbeat::BEAT_BYTES - 32;
        let mac = blake3::keyed_hash(&key, &signed[..body]);
        signed[body..].copy_from_slice(mac.as_bytes());
        let _ = heartbeat::open(&key, &signed);
    }
    (believed.is_none(), u64::from(believed.is_some()))
}
