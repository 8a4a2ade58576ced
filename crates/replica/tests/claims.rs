//! What a spare may rely on whatever arrives.

use std::time::Duration;

use hotspare_replica::fuzz::{Target, decoder, images, peers, receive, run, stream};
use proptest::prelude::*;
use proptest::sample::Index;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_flipped_bit_is_always_refused(seed in 0u64..64, at in any::<Index>(), bit in 0..8) {
        let mut bytes = stream(seed);
        let (sent, error) = receive(&bytes);
        prop_assert!(error.is_none());
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        let (committed, error) = receive(&bytes);
        prop_assert!(error.is_some());
        prop_assert!(sent.starts_with(&committed));
    }

    #[test]
    fn a_truncated_stream_never_commits_what_it_lost(seed in 0u64..64, at in any::<Index>()) {
        let bytes = stream(seed);
        let (sent, _) = receive(&bytes);
        let (committed, error) = receive(&bytes[..at.index(bytes.len())]);
        prop_assert!(error.is_some());
        prop_assert!(sent.starts_with(&committed));
    }
}

#[test]
fn damaged_answers_greetings_and_heartbeats_are_survived() {
    let half = Duration::from_millis(500);
    for (name, target) in [
        ("replies", peers::replies as Target),
        ("greeting", peers::greeting),
        ("beats", peers::beats),
        ("images", images::images),
    ] {
        let report = run(name, target, 1, half);
        let some = report.refused > 10 && report.refused < report.cases + 1;
        assert!(some && report.cases > 100, "{name}: {report:?}");
    }
    let believed = run("replies", peers::replies, 1, half);
    assert!(believed.committed > 10, "nothing honest comes through: {believed:?}");
}

#[test]
fn damaged_streams_are_survived() {
    let report = decoder(1, Duration::from_secs(2));
    assert!(report.refused > 0 && report.cases > 10, "{report:?}");
}
