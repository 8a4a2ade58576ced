//! The bench measures something when nothing is protected.

use std::time::Duration;

use hotspare_torture::bench::{PauseBench, pause};

#[test]
fn an_unprotected_redis_serves_as_fast_as_it_can() {
    let bench = PauseBench {
        hotspare: None,
        spare: false,
        more: vec![],
        keys: 1000,
        writes: 0.5,
        rate_per_s: 100.0,
        epoch: Duration::from_millis(100),
        length: Duration::from_millis(300),
    };
    let result = pause(&bench).unwrap();
    println!("{result:?}");
    let saturated = &result.saturated;
    assert!(saturated.replies_per_s > 0.0 && saturated.latency_ms.max > 0.0);
    assert!(saturated.epochs.is_empty() && result.steady.latency_ms.count == 0);
    assert!(result.guest_mb > 1.0);
}
