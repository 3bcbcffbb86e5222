"""What all parts of the suite share: fresh processes, interleaved rounds, statistics, machine limits, reports."""
