// Stands in for ROS 2's message: its fields that a node needs.
#pragma once

#include <vector>

namespace std_msgs::msg {
struct Float32MultiArray {
    std::vector<float> data;
};
} // namespace std_msgs::msg
